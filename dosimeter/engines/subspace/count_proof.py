"""Whether certified samples are the whole batch: a sample without a trace in the weight's gradient is missed by all of its equations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import rounding_slack
from dosimeter.engines.subspace.problem import may_be_scaled, scaled_by_layer
from dosimeter.engines.subspace.verdict import Separation
from dosimeter.interfaces import Public
from dosimeter.network.head import Head

LARGEST_REST = 0.05  # samples of a class that may be left in the bias's gradient where all samples are taken to be found
TRACE = "every sample leaves a trace in the head's gradient: neither its scale nor the batch size is known"


@dataclass(frozen=True, kw_only=True)
class CountProof:
    """What is proved of the samples per class."""

    least: Tensor  # (C,) int64, samples proved to be in each class
    size: int | None  # of the batch: declared, or read off the gradient's scale
    whole: bool  # the proved samples are the whole batch
    message: str = ""  # what is not proved, "" where nothing is left
    premises: tuple[str, ...] = ()  # beside those of every certificate


def prove_counts(found: Separation, head: Head, public: Public) -> CountProof:
    """The counts of the certified samples and, where these explain the whole weight gradient, of the samples that only the bias shows."""
    sure, times = found.certified, found.times
    least = torch.zeros(head.classes, dtype=torch.long, device=times.device).index_add(0, found.labels[sure], times[sure])
    placed = int(least.sum())
    size = public.batch_size if public.batch_size is not None else found.batch_size
    if size is not None and placed > size:
        message = f"{placed} samples explain the gradient, and the declared batch size is {size}: one of the two is wrong"
        return CountProof(least=torch.zeros_like(least), size=size, whole=False, message=message)
    if not found.complete:
        message = f"{int(sure.sum())} of {found.rank} dimensions of the gradient are certified; the other labels are guesses"
        return CountProof(least=least, size=size, whole=False, message=message)
    rest = _rest_of_bias(found, head, public) if placed != size else None
    if size is None:
        whole = rest is not None and float(rest.samples.abs().max()) <= LARGEST_REST + rest.slack
        message = "" if whole else "neither the gradient's scale nor the batch size is known: samples that leave no trace may be missing"
        return CountProof(least=least, size=placed if whole else None, whole=whole, message=message, premises=(TRACE,))
    if rest is not None:
        more = (-rest.samples - rest.slack).ceil().clamp_min(0).long()  # probabilities are positive, so n_k ≥ n_k − Σ_j p_jk
        least = least + more if placed + int(more.sum()) <= size else least
    left = size - int(least.sum())
    message = f"{left} of {size} samples leave no trace in the head's gradient, and their labels are guesses" if left else ""
    return CountProof(least=least, size=size, whole=left == 0, message=message)


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """Σ_j (p_j − y_j) over the samples that are not found, in samples."""

    samples: Tensor  # (C,)
    slack: float  # by how much rounding and the found samples' error bars may move an entry


def _rest_of_bias(found: Separation, head: Head, public: Public) -> _Rest | None:
    """The bias's gradient without the certified samples. None where its entries may be changed, or where labels are soft."""
    loss = public.loss
    assert isinstance(loss, CrossEntropy)
    assert head.weight_gradient is not None
    changed = scaled_by_layer(public) or any(defense.distorts() for defense in public.defenses)
    if head.bias_gradient is None or changed or loss.smoothing > 0 or found.soft is not None:
        return None
    sure = found.certified
    features, times = found.features[sure], found.times[sure].double()
    errors = torch.softmax(head.logits(features) / loss.temperature, 1) - one_hot(found.labels[sure], head.classes)  # (n, C)
    unit = (found.batch_size or 0) * loss.temperature
    if may_be_scaled(public):
        explained = (times[:, None] * errors).T @ features  # (C, H), B τ ∇W up to the scale
        unit = float(explained.square().sum() / (explained * head.weight_gradient.double()).sum())
    longest = float(torch.linalg.vector_norm(head.weight.double(), dim=1).max()) / loss.temperature
    moved = 0.5 * longest * times * found.error_bar[sure] * torch.linalg.vector_norm(features, dim=1)  # no probability moves by more
    slack = rounding_slack(head.bias_gradient, round(unit)) + float(moved.sum())
    return _Rest(samples=unit * head.bias_gradient.double() - times @ errors, slack=slack)
