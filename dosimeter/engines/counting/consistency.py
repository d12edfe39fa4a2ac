"""Whether an update can be the gradient that was declared: what softmax gradients of a batch have in common."""

from __future__ import annotations

from torch import Generator, Tensor

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.subspace.spectrum import factor, rounding_unit
from dosimeter.interfaces import Loss
from dosimeter.network.head import Head

ROUNDINGS = 64.0  # rounding units by which the rows may miss a sum of zero, relative to the sum of their sizes
PROBABILITY_ROUNDINGS = 8.0  # the same of a probability near one: its distance from one is rounded as one is, however small it is


def refutation_of_batch(head: Head, size: int, loss: Loss, rng: Generator) -> str:
    """Why the head's gradient is not that of one batch of `size` samples; "" where nothing refutes it.

    The errors softmax(z) − y of a sample sum to zero over the classes and lie in [−1, 1]. The gradient's rank is at most the batch size.
    """
    temperature = loss.temperature if isinstance(loss, CrossEntropy) else 1.0
    for name, gradient in (("bias", head.bias_gradient), ("weight", head.weight_gradient)):
        if gradient is not None and not _rows_sum_to_zero(gradient, _feature_size(name, head) / temperature):
            return f"the rows of the {name}'s gradient do not sum to zero, as those of every softmax loss do"
    if head.bias_gradient is not None and float(head.bias_gradient.double().abs().max()) * temperature > 1 + 1e-3:
        return "an entry of the bias's gradient is larger than any mean of probabilities"
    assert head.weight_gradient is not None
    rank = factor(head.weight_gradient.double(), rounding_unit(head.weight_gradient), rng).rank
    return f"the head's gradient has rank {rank}, more than the {size} samples declared" if rank > size else ""


def _rows_sum_to_zero(gradient: Tensor, feature_size: float) -> bool:
    """Whether they do, but for rounding: of the entries, and of the probabilities that multiply features of this size."""
    rows, unit = gradient.double(), rounding_unit(gradient)
    off = ROUNDINGS * float(rows.abs().sum(0).norm()) + PROBABILITY_ROUNDINGS * feature_size
    return float(rows.sum(0).norm()) <= unit * off


def _feature_size(name: str, head: Head) -> float:
    """The norm of what multiplies the errors in a gradient: one for a bias. A head without bias does not show it."""
    if name == "bias":
        return 1.0
    if head.bias_gradient is None or head.weight_gradient is None:
        return 0.0
    errors = float(head.bias_gradient.double().abs().sum())
    return float(head.weight_gradient.double().norm(dim=1).sum()) / errors if errors > 0 else 0.0
