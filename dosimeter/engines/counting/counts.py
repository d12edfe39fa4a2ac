"""From real-valued estimates to whole counts of samples per class, and from counts to labels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dosimeter.client.losses import CrossEntropy
from dosimeter.interfaces import Loss
from dosimeter.network.head import Head
from dosimeter.types import LabelEstimate, Outcome

LEAST_ROUNDING_SLACK = 1e-3  # samples


def rounding_slack(gradient: Tensor, total: int) -> float:
    """By how many samples of `total` a count may be too high because the gradient is rounded: 4 units in the last place for each sample."""
    return max(LEAST_ROUNDING_SLACK, 4 * torch.finfo(gradient.dtype).eps * total)


def nearest_counts(estimate: Tensor, total: int | Tensor, at_least: Tensor | None = None) -> Tensor:
    """The whole counts that sum to `total` and lie nearest to `estimate` (..., C), none below `at_least` (default 0).

    Class i offers units worth x_i, x_i − 1, x_i − 2, ...: by so much each unit lowers the squared distance, up to a factor and
    a constant. The `total` most valuable units are taken. This largest-remainder rule is exact, since the objective is
    separable and convex.
    """
    floor = torch.zeros_like(estimate, dtype=torch.float64) if at_least is None else at_least.to(torch.float64)
    wanted = torch.nan_to_num(estimate.to(torch.float64)) - floor  # (..., C)
    units = total - floor.sum(-1, keepdim=True)  # (..., 1) not yet given to a class
    if bool((units < 0).any()):
        raise ValueError(
            f"counts: {int(floor.sum(-1).max())} samples are already placed, more than the {int(torch.as_tensor(total).max())}"
        )
    low = wanted.amin(-1, keepdim=True) - units - 1  # at this price every class takes all units
    high = wanted.amax(-1, keepdim=True) + 1  # at this price no class takes any
    for _ in range(100):
        price = (low + high) / 2
        affordable = _units_above(wanted, price).sum(-1, keepdim=True) <= units
        low, high = torch.where(affordable, low, price), torch.where(affordable, price, high)
    taken = _units_above(wanted, high)
    left = units - taken.sum(-1, keepdim=True)  # units worth the price itself, which tie
    rank = (wanted - taken).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (floor + taken + (rank < left)).long()


def least_counts(head: Head, total: int, loss: Loss) -> Tensor:
    """Lower bounds on the classes' counts, by signs alone: (C,).

    Under cross-entropy with one-hot labels −B τ ∇b_k = n_k − Σ_i p_ik. Probabilities are positive, so n_k is at least the left
    side, rounded up, whatever the features. Where no feature is negative, a class whose row of ∇W has a negative entry has a
    sample. Where the bounds sum to B, they are the counts. Under another loss they are all zero, and also where they sum to
    more than B: then the gradient is not the batch's own.
    """
    least = torch.zeros(head.classes, dtype=torch.float64, device=head.weight.device)
    if not isinstance(loss, CrossEntropy) or loss.smoothing > 0:
        return least
    if head.bias_gradient is not None:
        least = (-total * loss.temperature * head.bias_gradient.double() - rounding_slack(head.bias_gradient, total)).ceil().clamp_min(0)
    if head.weight_gradient is not None and head.non_negative:
        least = torch.maximum(least, (head.weight_gradient.amin(1) < 0).to(least))
    return least if int(least.sum()) <= total else torch.zeros_like(least)


def apportion(weights: Tensor, present: Tensor, total: int | None) -> Tensor:
    """One sample for each present class and the rest in proportion to `weights`; both are (C,).

    Each present class gets one sample and no more where `total` is unknown. So it does where the rule finds more present classes
    than samples: such a rule has failed, and its answer stays as it is.
    """
    weights = torch.where(present, torch.nan_to_num(weights.to(torch.float64)).clamp_min(0), 0)
    if total is None or int(present.sum()) > total:
        return present.long()
    share = weights / weights.sum() if float(weights.sum()) > 0 else present / present.sum()
    reachable = torch.where(present, share * total, -float(total))
    return nearest_counts(reachable, total, at_least=present)


def present_classes(scores: Tensor, present: Tensor, weights: Tensor, total: int | None, *, once: bool, rule: str) -> LabelEstimate:
    """The estimate of a rule that finds present classes: the batch apportioned among them, or each class `once`.

    `rule` describes what marks a present class. The message needs it where no class has the mark, or more classes than samples.
    """
    outcome, message = Outcome.COMPLETED, ""
    if not bool(present.any()):
        present, outcome = torch.zeros_like(present).index_fill(0, scores.argmax(), True), Outcome.AMBIGUOUS
        message = f"no class {rule}; the one that comes nearest is taken"
    elif total is None:
        outcome, message = Outcome.PARTIAL, "the batch size is not declared; each present class is counted once"
    elif int(present.sum()) > total:
        outcome, message = Outcome.AMBIGUOUS, f"{int(present.sum())} classes for {total} samples: that a class {rule} tells nothing here"
    counts = present.long() if once else apportion(weights, present, total)
    return estimate_of(counts, scores=scores, outcome=outcome, message=message)


def nothing_to_read(rows: Tensor, total: int | None, gradient: str = "the head's gradient") -> LabelEstimate:
    """The estimate from a gradient of zero, one row a class: the samples are spread evenly, one sample where no size is declared."""
    scores = torch.zeros(max(len(rows), 2), dtype=torch.float64, device=rows.device)
    message = f"{gradient} is zero, and nothing tells the labels"
    return estimate_of(nearest_counts(scores, total or 1), scores=scores, confidence=0.0, outcome=Outcome.SINGULAR, message=message)


def labels_of(counts: Tensor) -> Tensor:
    """The class id of each counted sample, in ascending order: (B,)."""
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.clamp_min(0))


def whole_number_confidence(estimate: Tensor, counts: Tensor) -> float:
    """1 where the estimate is whole, 0 where some class is rounded by half a sample or more."""
    return float((1 - 2 * (torch.nan_to_num(estimate.to(torch.float64)) - counts).abs().max()).clamp(0, 1))


def estimate_of(
    counts: Tensor,
    *,
    scores: Tensor,
    certified: bool = False,
    premises: tuple[str, ...] = (),
    confidence: float | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    message: str = "",
    details: Mapping[str, Tensor] | None = None,
) -> LabelEstimate:
    """The label estimate with these counts."""
    return LabelEstimate(
        counts=counts,
        labels=labels_of(counts),
        scores=scores,
        certified=certified,
        premises=premises,
        confidence=confidence,
        outcome=outcome,
        message=message,
        details=details or {},
    )


def _units_above(wanted: Tensor, price: Tensor) -> Tensor:
    """How many units of each class are worth more than the price."""
    return (wanted - price).ceil().clamp_min(0)
