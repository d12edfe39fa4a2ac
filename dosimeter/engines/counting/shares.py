"""Each class's share of a batch, from the mean gradient at the logits and the server's own samples; and whole counts from shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import softmax

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, Focal
from dosimeter.engines.counting.auxiliary import logits_in_chunks
from dosimeter.engines.counting.batch_size import declared_or_inferred
from dosimeter.engines.counting.counts import estimate_of, nearest_counts, whole_number_confidence
from dosimeter.interfaces import Loss, Public
from dosimeter.network.head import Head
from dosimeter.types import LabelEstimate, Outcome, Refused


def class_shares(loss: Loss, head: Head, features: Tensor, mean_gradient: Tensor, method: str) -> Tensor:
    """Solve mean gradient = mean φ(p − y) for the mean label, taking p and φ from `features` (n, H): (C,).

    Zhang's thesis, Table 3.1 and Eq. (4.21). Under cross-entropy y = p − τ·gradient, and smoothing is undone. Focal loss weighs the
    samples of class t with Φ_t, so that gradient = p Σ_t s_t Φ_t − s Φ with Σ s = 1. Binary cross-entropy has a sigmoid in
    place of the softmax.
    """
    gradient = mean_gradient.double()
    if isinstance(loss, CrossEntropy):
        probabilities = _mean(head, features, lambda z: softmax(z / loss.temperature, 1))
        unit = torch.eye(2, head.classes, dtype=torch.float64, device=gradient.device)[:1]
        on, off = loss.smooth_targets(unit, head.classes, torch.float64)[0, :2]
        return (probabilities - loss.temperature * gradient - off) / (on - off)
    if isinstance(loss, Focal):
        probabilities = _mean(head, features, lambda z: softmax(z / loss.temperature, 1))
        weights = _mean(head, features, loss.weight) / loss.temperature
        shared = (1 + (gradient / weights).sum()) / (probabilities / weights).sum()  # Σ_t s_t Φ_t, from Σ s = 1
        return (shared * probabilities - gradient) / weights
    if isinstance(loss, BinaryCrossEntropy):
        scale = head.classes if loss.over_classes == "mean" else 1
        return _mean(head, features, torch.sigmoid) - scale * gradient
    raise Refused(f"{method} knows cross-entropy, focal and binary cross-entropy, not the client's {loss.name}")


def counts_of(
    shares: Tensor,
    weight_gradient: Tensor | None,
    public: Public,
    method: str,
    *,
    whole: Callable[[Tensor, int], Tensor] = nearest_counts,
    details: Mapping[str, Tensor] | None = None,
) -> LabelEstimate:
    """The estimate from shares (C,) of a batch of declared or inferred size; `whole` turns size × shares into counts."""
    size, outcome, message = declared_or_inferred(public.batch_size, shares, weight_gradient, method)
    estimate = size * shares
    counts = whole(estimate, size)
    if isinstance(public.loss, BinaryCrossEntropy) and public.classes > 1:
        message = f"{message} under binary cross-entropy a sample may have several classes; these counts assume one each".strip()
    confidence = whole_number_confidence(estimate, counts) if outcome is Outcome.COMPLETED else None  # a guessed size has none
    return estimate_of(counts, scores=estimate, confidence=confidence, outcome=outcome, message=message, details=details)


def _mean(head: Head, features: Tensor, of_logits: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of a function of the logits over the samples: (C,)."""
    total = torch.zeros(head.classes, dtype=torch.float64, device=features.device)
    for _, logits in logits_in_chunks(head, features):
        total += of_logits(logits).sum(0)
    return total / len(features)
