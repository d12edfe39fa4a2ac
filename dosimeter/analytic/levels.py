"""Pictures have 256 levels a pixel. A mixture of two pictures lies between the levels, one picture lies on them."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.types import Normalization

LEVELS = 255
NEAR = 0.1  # of a level
VISIBLE = 0.02  # of a level: root mean square of noise that is nowhere as large as NEAR


def on_levels(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Whether all pixels of each sample (n, channels, ...) lie next to 8-bit levels, without being all the same: (n,)."""
    scaled = to_pixels(inputs, normalization) * LEVELS
    off = (scaled - scaled.round()).abs().flatten(1).amax(1)
    return (off < NEAR) & (scaled.flatten(1).amax(1) - scaled.flatten(1).amin(1) > 1)


def visible(noise: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Whether levels between `low` and `high` show through noise of that root mean square an entry (n,): (n,)."""
    return noise < VISIBLE * float((high - low).min()) / LEVELS


def snapped(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Samples that lie on the levels to within rounding, exactly on them; the others as they are."""
    levels = (to_pixels(inputs, normalization) * LEVELS).round() / LEVELS
    sure = on_levels(inputs, normalization).reshape(-1, *[1] * (inputs.ndim - 1))
    return torch.where(sure, from_pixels(levels, normalization), inputs)
