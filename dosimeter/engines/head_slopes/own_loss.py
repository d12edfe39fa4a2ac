"""Labels under a loss of the client's own: the ones whose slopes, computed by the loss itself, are those of the head's gradient.

A sample's slope at its outputs is a positive factor times ∂l(z, y)/∂z, where the factor is 1, one over the batch size, or a class's
share of the weights. So the direction of the slope, at the certified outputs z = W f + b, names the label by trying each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, one_hot

from dosimeter.client.losses import BinaryCrossEntropy, OwnLoss
from dosimeter.interfaces import Loss
from dosimeter.network.head import Head

ALIGNED = 1e-3  # sine of the angle between a slope and the one that its label has, beside the error bar
MOST_CLASSES = 4096  # that are tried

Closing = Callable[[Tensor], Tensor]  # what makes the model's outputs of the logits


def loss_at_logits(loss: Loss, head: Head) -> Loss:
    """The loss as a function of the head's logits, where it is one whose closed form is known; else as it is."""
    function = getattr(loss, "function", None)
    plain = isinstance(function, nn.BCELoss) and function.weight is None and function.reduction == "mean"
    return BinaryCrossEntropy() if plain and head.closing == "sigmoid" else loss


def class_by_slope(loss: OwnLoss, closing: Closing, logits: Tensor, slopes: Tensor, error_bar: Tensor) -> Tensor | None:
    """The one class (n,) whose slope each sample has, −1 where none or several have it; None where the loss takes no class ids."""
    classes = logits.shape[1]
    if classes > MOST_CLASSES:
        return None
    every, found = torch.arange(classes, device=logits.device), []
    try:
        for row, slope, bar in zip(logits, slopes, error_bar):
            fits = _fits(loss.slopes(row.expand(classes, -1), every, closing), slope.expand(classes, -1), bar)
            alone = int(fits.nonzero()) if int(fits.sum()) == 1 else -1
            sure = alone >= 0 and bool(_fits(loss.slopes(row[None], every[alone : alone + 1], closing), slope[None], bar))
            found.append(alone if sure else -1)
    except (RuntimeError, ValueError):  # soft labels, or targets of another shape
        return None
    return torch.tensor(found, dtype=torch.int64, device=logits.device)


def vectors_by_slopes(loss: OwnLoss, closing: Closing, logits: Tensor, slopes: Tensor, error_bar: Tensor) -> tuple[Tensor, Tensor] | None:
    """Label vectors (n, C) of zeros and ones by the signs of the slopes, and whether the slopes are theirs; None where signs tell none.

    Where a label's slope is negative at 1 and positive at 0, whatever the other labels, no two vectors have slopes of one direction.
    """
    vectors = (slopes < 0).to(logits)
    try:
        absent, present = loss.slopes(logits, torch.zeros_like(logits), closing), loss.slopes(logits, torch.ones_like(logits), closing)
        if not bool(((absent >= 0) & (present <= 0)).all()):
            return None
        fits = [_fits(loss.slopes(z[None], y[None], closing), d[None], bar) for z, y, d, bar in zip(logits, vectors, slopes, error_bar)]
    except (RuntimeError, ValueError):
        return None
    return vectors, torch.cat(fits)


def expected_of_softmax(logits: Tensor, slopes: Tensor, error_bar: Tensor) -> Tensor:
    """The class (n,) whose slope under a softmax with any positive weight each sample has, −1 where none has: only its own is negative."""
    labels = slopes.argmin(1)
    expected = logits.softmax(1) - one_hot(labels, logits.shape[1])
    return torch.where(_fits(expected, slopes, error_bar), labels, -1)


def _fits(expected: Tensor, slopes: Tensor, error_bar: Tensor) -> Tensor:
    """Whether slopes point where expected, to their error bar: (n,)."""
    cosine = cosine_similarity(expected.double(), slopes.double(), dim=1)
    sine = (1 - cosine.square()).clamp_min(0).sqrt()
    return (cosine > 0) & (sine <= ALIGNED + error_bar)
