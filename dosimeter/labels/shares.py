"""Each class's share of a batch, from the mean gradient at the logits and what the server's own samples predict."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softmax

from dosimeter.head import Head
from dosimeter.interfaces import Loss
from dosimeter.labels.auxiliary import logits_in_chunks
from dosimeter.losses import BinaryCrossEntropy, CrossEntropy, Focal
from dosimeter.types import Refused


def class_shares(loss: Loss, head: Head, features: Tensor, mean_gradient: Tensor, method: str) -> Tensor:
    """Solve mean gradient = mean φ(p − y) for the mean label, taking p and φ from `features` (n, H): (C,).

    Zhang's thesis, Table 3.1 and Eq. (4.21). The loss decides: cross-entropy has y = p − τ·gradient, and smoothing is
    undone; focal loss weighs class t's samples with Φ_t, so that gradient = p Σ_t s_t Φ_t − s Φ with Σ s = 1; binary
    cross-entropy has a sigmoid in place of the softmax.
    """
    gradient = mean_gradient.double()
    if isinstance(loss, CrossEntropy):
        probabilities = _mean(head, features, lambda z: softmax(z / loss.temperature, 1))
        unit = torch.eye(2, head.classes, dtype=torch.float64, device=gradient.device)[:1]
        on, off = loss.smoothed(unit, head.classes, torch.float64)[0, :2]
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


def _mean(head: Head, features: Tensor, of_logits: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of a function of the logits over the samples: (C,)."""
    total = torch.zeros(head.classes, dtype=torch.float64, device=features.device)
    for _, logits in logits_in_chunks(head, features):
        total += of_logits(logits).sum(0)
    return total / len(features)
