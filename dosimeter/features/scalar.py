"""One sample without a bias: its feature is known up to a scalar, and the label tells the scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from dosimeter.head import Head, find_head
from dosimeter.interfaces import FeatureRecovery
from dosimeter.losses import CrossEntropy
from dosimeter.options import PositiveFloat
from dosimeter.registry import FEATURES
from dosimeter.types import Exposure, FeatureEstimate, Knowledge, LabelEstimate, Outcome, Refused

GRID = 20_000  # guesses of the scalar, half of either sign, logarithmic
POLISHES = 60  # golden-section steps
GOLDEN = (5**0.5 - 1) / 2


@FEATURES.register("scalar")
@dataclass(frozen=True, kw_only=True)
class Scalar(FeatureRecovery):
    """Recovers the feature and the soft label of a single sample by a search over one scalar, without any bias.

    "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (2)-(5). The gradient of one
    sample is (p − y) fᵀ, so f = s v for a known direction v, and ŷ(s) = softmax(W v s + b) − ∇W v / s (Eq. 4). The right s
    makes all but the largest entries of ŷ equal (Eq. 5): all but one for smoothed and one-hot labels, all but two for mixup.
    Departures: v is the gradient's leading right singular vector, not one row; the search evaluates a logarithmic grid of
    both signs in one batch and polishes the best by golden section, instead of L-BFGS and a particle swarm; the variance is
    taken relative to the error's size, since it vanishes trivially where the softmax saturates; labels with entries below
    zero are dropped.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE, Knowledge.SOFTMAX_LOSS})

    family: Literal["smoothing", "mixup"] = "smoothing"
    bound: PositiveFloat = 1e4  # the largest feature norm tried

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head, loss = find_head(exposure), exposure.public.loss
        assert head.weight_gradient is not None
        if not isinstance(loss, CrossEntropy):
            raise Refused(f"scalar solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.name}")
        if head.classes < 4:
            raise Refused(f"scalar needs at least 4 classes to compare, got {head.classes}")
        problem = _problem(head, loss.temperature, top=1 if self.family == "smoothing" else 2)
        lengths = torch.logspace(-4, torch.tensor(self.bound).log10().item(), GRID // 2, dtype=torch.float64, device=head.weight.device)
        signs = (1.0,) if head.non_negative else (1.0, -1.0)
        best, value = None, torch.inf
        for sign in signs:
            values = problem.objective(sign * lengths)
            for index in values.topk(5, largest=False).indices.tolist():
                low, high = lengths[max(index - 1, 0)], lengths[min(index + 1, len(lengths) - 1)]
                length = _golden(problem, sign, low, high)
                reached = float(problem.objective((sign * length)[None]))
                if reached < value:
                    best, value = sign * length, reached
        assert best is not None
        return _estimate(problem, best, value, head)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    direction: Tensor  # (H,) v, of length one; the sum of its entries is not negative
    pull: Tensor  # (C,) W v / τ
    bias: Tensor  # (C,) b / τ
    error: Tensor  # (C,) τ ∇W v = s (p − y)
    top: int  # entries of the label that may differ from the rest

    def labels(self, scalars: Tensor) -> Tensor:
        """Eq. (4): (n,) -> (n, C)."""
        return torch.softmax(scalars[:, None] * self.pull + self.bias, 1) - self.error / scalars[:, None]

    def objective(self, scalars: Tensor) -> Tensor:
        """Eq. (5) over the squared error: (n,); infinite where the label has negative entries."""
        labels = self.labels(scalars)
        rest = labels.sort(1).values[:, : labels.shape[1] - self.top]
        size = (self.error.square().sum() / scalars.square()).clamp_min(1e-300)
        negative = rest.amin(1) < -1e-3 - 1e-2 * size.sqrt()
        return torch.where(negative, torch.inf, rest.var(1, correction=0) / size)


def _problem(head: Head, temperature: float, top: int) -> _Problem:
    assert head.weight_gradient is not None
    gradient = head.weight_gradient.double()
    direction = _leading(gradient)
    bias = torch.zeros_like(gradient[:, 0]) if head.bias is None else head.bias.double()
    return _Problem(
        direction=direction,
        pull=head.weight.double() @ direction / temperature,
        bias=bias / temperature,
        error=temperature * gradient @ direction,
        top=top,
    )


def _leading(gradient: Tensor) -> Tensor:
    """The leading right singular vector, turned so that its entries do not sum to less than zero: (H,)."""
    vector = torch.linalg.svd(gradient, full_matrices=False).Vh[0]
    return vector if float(vector.sum()) >= 0 else -vector


def _golden(problem: _Problem, sign: float, low: Tensor, high: Tensor) -> Tensor:
    """Golden-section search between two neighbours of a grid point."""
    for _ in range(POLISHES):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        values = problem.objective(sign * torch.stack([left, right]))
        low, high = (low, right) if float(values[0]) <= float(values[1]) else (left, high)
    return (low + high) / 2


def _estimate(problem: _Problem, scalar: Tensor, value: float, head: Head) -> FeatureEstimate:
    assert head.weight_gradient is not None
    label = problem.labels(scalar[None])  # (1, C)
    dtype = torch.promote_types(head.weight_gradient.dtype, torch.float32)
    found = value < torch.inf
    return FeatureEstimate(
        features=(scalar * problem.direction)[None].to(dtype),
        labels=label.argmax(1),
        residual=torch.tensor([value**0.5], dtype=dtype, device=label.device),
        certified=torch.zeros(1, dtype=torch.bool, device=label.device),
        soft=label.to(dtype),
        batch_size=1,
        outcome=Outcome.COMPLETED if found else Outcome.AMBIGUOUS,
        message="" if found else "no scalar within the bound gives a label without negative entries",
    )
