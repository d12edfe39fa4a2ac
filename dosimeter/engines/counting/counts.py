"""From real-valued estimates to whole counts of samples per class, and from counts to labels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dosimeter.client.losses import CrossEntropy
from dosimeter.interfaces import Loss
from dosimeter.network.head import Head
from dosimeter.types import LabelEstimate, Outcome

ROUNDING = 1e-3  # samples that the rounding of a gradient may feign at the least


def feigned(gradient: Tensor, total: int) -> float:
    """How many samples of `total` the rounding of a gradient may feign: some units in the last place of each."""
    return max(ROUNDING, 4 * torch.finfo(gradient.dtype).eps * total)


def nearest_counts(estimate: Tensor, total: int | Tensor, at_least: Tensor | None = None) -> Tensor:
    """The whole counts that sum to `total` and lie nearest to `estimate` (..., C), none below `at_least` (default 0).

    Class i offers units worth x_i, x_i − 1, x_i − 2, ... (what each still takes off the squared distance); the `total`
    most valuable ones are taken. This is the largest-remainder rule, and exact: the objective is separable and convex.
    """
    floor = torch.zeros_like(estimate, dtype=torch.float64) if at_least is None else at_least.to(torch.float64)
    wanted = torch.nan_to_num(estimate.to(torch.float64)) - floor  # (..., C)
    units = total - floor.sum(-1, keepdim=True)  # (..., 1) still to be given away
    if bool((units < 0).any()):
        raise ValueError(
            f"counts: {int(floor.sum(-1).max())} samples are already placed, more than the {int(torch.as_tensor(total).max())}"
        )
    low = wanted.amin(-1, keepdim=True) - units - 1  # at this price every class takes all units
    high = wanted.amax(-1, keepdim=True) + 1  # at this one none takes any
    for _ in range(100):
        price = (low + high) / 2
        affordable = _taken(wanted, price).sum(-1, keepdim=True) <= units
        low, high = torch.where(affordable, low, price), torch.where(affordable, price, high)
    taken = _taken(wanted, high)
    left = units - taken.sum(-1, keepdim=True)  # units that tie at the price itself
    rank = (wanted - taken).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (floor + taken + (rank < left)).long()


def least_counts(head: Head, total: int, loss: Loss) -> Tensor:
    """How many samples each class has at the very least, by signs alone: (C,).

    Under cross-entropy with one-hot labels −B τ ∇b_k = n_k − Σ_i p_ik, and probabilities are positive: n_k is at least that,
    rounded up, whatever the features. And where features are not negative, a row of ∇W with a negative entry has a
    sample. Where these numbers sum to B they are the counts. All zeros under another loss, or where they sum to more than
    B, since then the gradient is not the batch's own.
    """
    least = torch.zeros(head.classes, dtype=torch.float64, device=head.weight.device)
    if not isinstance(loss, CrossEntropy) or loss.smoothing > 0:
        return least
    if head.bias_gradient is not None:
        least = (-total * loss.temperature * head.bias_gradient.double() - feigned(head.bias_gradient, total)).ceil().clamp_min(0)
    if head.weight_gradient is not None and head.non_negative:
        least = torch.maximum(least, (head.weight_gradient.amin(1) < 0).to(least))
    return least if int(least.sum()) <= total else torch.zeros_like(least)


def apportioned(weights: Tensor, present: Tensor, total: int | None) -> Tensor:
    """One sample for each present class and the rest in proportion to `weights`; both are (C,).

    Each present class counts once, and no more, where `total` is unknown or where more classes are said to be present
    than there are samples: a rule that claims that has failed, and its answer is left as it is.
    """
    weights = torch.where(present, torch.nan_to_num(weights.to(torch.float64)).clamp_min(0), 0)
    if total is None or int(present.sum()) > total:
        return present.long()
    share = weights / weights.sum() if float(weights.sum()) > 0 else present / present.sum()
    reachable = torch.where(present, share * total, -float(total))
    return nearest_counts(reachable, total, at_least=present)


def present_classes(scores: Tensor, present: Tensor, weights: Tensor, total: int | None, *, once: bool, rule: str) -> LabelEstimate:
    """The estimate of a rule that tells which classes are present: counts apportioned, or each class `once`.

    `rule` says what a present class shows, for the message where no class shows it or more do than there are samples.
    """
    outcome, message = Outcome.COMPLETED, ""
    if not bool(present.any()):
        present, outcome = torch.zeros_like(present).index_fill(0, scores.argmax(), True), Outcome.AMBIGUOUS
        message = f"no class {rule}; the one that comes nearest is taken"
    elif total is None:
        outcome, message = Outcome.PARTIAL, "the batch size is not declared; each present class is counted once"
    elif int(present.sum()) > total:
        outcome, message = Outcome.AMBIGUOUS, f"{int(present.sum())} classes for {total} samples: that a class {rule} tells nothing here"
    counts = present.long() if once else apportioned(weights, present, total)
    return counted(counts, scores=scores, outcome=outcome, message=message)


def nothing_to_read(rows: Tensor, total: int | None, gradient: str = "the head's gradient") -> LabelEstimate:
    """What a gradient of zero says, one row a class: nothing. The samples, or one where none are declared, are spread over the classes."""
    scores = torch.zeros(max(len(rows), 2), dtype=torch.float64, device=rows.device)
    message = f"{gradient} is zero, and nothing tells the labels"
    return counted(nearest_counts(scores, total or 1), scores=scores, confidence=0.0, outcome=Outcome.SINGULAR, message=message)


def labels_of(counts: Tensor) -> Tensor:
    """The counts written out: (B,) class ids in ascending order."""
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.clamp_min(0))


def whole_number_confidence(estimate: Tensor, counts: Tensor) -> float:
    """1 where the estimate came out in whole numbers, 0 where a class had to be rounded by half a sample or more."""
    return float((1 - 2 * (torch.nan_to_num(estimate.to(torch.float64)) - counts).abs().max()).clamp(0, 1))


def counted(
    counts: Tensor,
    *,
    scores: Tensor,
    certified: bool = False,
    confidence: float | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    message: str = "",
    details: Mapping[str, Tensor] | None = None,
) -> LabelEstimate:
    """The estimate that says these counts."""
    return LabelEstimate(
        counts=counts,
        labels=labels_of(counts),
        scores=scores,
        certified=certified,
        confidence=confidence,
        outcome=outcome,
        message=message,
        details=details or {},
    )


def _taken(wanted: Tensor, price: Tensor) -> Tensor:
    """How many units of each class are worth more than the price."""
    return (wanted - price).ceil().clamp_min(0)
