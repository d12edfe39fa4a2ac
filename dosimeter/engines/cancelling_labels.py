"""Whether the gradients of several samples can add up to zero, so that they hide behind the weight of one more sample."""

from __future__ import annotations

import torch
from torch import Tensor

CONSTANT_CHANGE = 2e-3  # relative, of the derivative at the logits: with less, samples whose labels cancel add no weight that shows
LABELS_CANCEL = 1e-4  # distance from a mean of labels up to which a prediction is one


def every_label(classes: int) -> Tensor:
    """The hard labels that one sample can have, as targets: (C, C), or 0 and 1 for one logit: (2, 1)."""
    return torch.eye(classes, dtype=torch.float64) if classes > 1 else torch.tensor([[0.0], [1.0]], dtype=torch.float64)


def relative_change(errors: Tensor, elsewhere: Tensor) -> float:
    """By how much the derivatives at the logits, under every label (labels, C), differ from those of another input."""
    return float((errors - elsewhere)[0].norm() / errors[0].norm().clamp_min(torch.finfo(errors.dtype).tiny))


def labels_can_cancel(errors: Tensor, elsewhere: Tensor, labels: Tensor, most_samples: int, occurring: Tensor | None = None) -> bool:
    """Whether other samples can share all rows with one sample and add no weight to them.

    Where the model predicts the same p for all inputs, k samples add Σ (p − y_i). This is zero if p is the mean of their labels: for
    p = 1/C, one sample of each class. A mixture of these and one more then has the weight of one sample. `errors` (labels, C) are the
    derivatives at the logits under each of the `labels` (labels, C), `elsewhere` those of an empty input. Where the labels that occur are
    known, as class ids, p must be a mean of these.
    """
    change = relative_change(errors, elsewhere)
    if change >= CONSTANT_CHANGE:
        return False
    predictions = errors + labels.to(errors)  # (labels, C): all p, if the error is p − y
    if bool((predictions - predictions[0]).abs().max() > LABELS_CANCEL):
        return True
    if bool(((predictions[0] - predictions[0].round()).abs() <= LABELS_CANCEL).all()):
        return False  # a sure model: p is a label, and only samples of this label cancel, each by itself
    if occurring is not None:
        absent = predictions[0].index_fill(0, occurring.to(predictions.device), 0)
        if bool((absent > LABELS_CANCEL + change).any()):
            return False
    counts = torch.arange(1, most_samples, device=errors.device)[:, None]  # of other samples
    sums = counts * predictions[0]
    off = ((sums - sums.round()).abs() / counts).amax(1)
    return bool((off <= LABELS_CANCEL + change).any())
