"""Pictures have 256 levels a pixel. A mixture of two pictures lies between the levels, one picture lies on them."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.types import Normalization

LARGEST_LEVEL = 255
NEAR_LEVEL = 0.1  # of a level
LEAST_TOLERANCE = 0.02  # of a level: the nearness that is asked for where there is hardly any noise
VISIBLE_NOISE = 0.02  # of a level: root mean square of noise that is nowhere as large as NEAR
NOISE_REACH = 6.0  # root mean squares of noise that no pixel is off by
MANY_LEVELS = 32  # different levels from which they speak for one picture


def are_near_levels(inputs: Tensor, normalization: Normalization, tolerance: Tensor | float = NEAR_LEVEL) -> Tensor:
    """Whether all pixels of each sample (n, channels, ...) lie next to 8-bit levels, without being all the same: (n,)."""
    scaled = to_pixels(inputs, normalization) * LARGEST_LEVEL
    off = (scaled - scaled.round()).abs().flatten(1).amax(1)
    return (off < tolerance) & (scaled.flatten(1).amax(1) - scaled.flatten(1).amin(1) > 1)


def have_few_levels(inputs: Tensor, normalization: Normalization) -> bool:
    """Whether most samples (n, channels, ...) of those on levels have few of them."""
    near = inputs[are_near_levels(inputs, normalization)]
    return len(near) > 0 and float(_use_many_levels(near, normalization).double().mean()) <= 0.5


def are_single_pictures(inputs: Tensor, normalization: Normalization, noise: Tensor, *, few: bool) -> Tensor:
    """Whether levels show each sample (n, channels, ...) to be one picture, under noise of that root mean square an entry (n,): (n,).

    A mixture of shares λ and 1 − λ lies λ d off a level of its second picture where the first is d levels away: all of these are
    whole numbers by chance once in 255 / (2 · tolerance · g) mixtures, with g the step between the levels in use, so one in five
    where the pictures are black and white. So where pictures have `few` levels they tell nothing, but for black and white alone,
    between which a mixture lies.
    """
    nothing = inputs.new_zeros(1, *inputs.shape[1:])
    slope = float((to_pixels(nothing + 1, normalization) - to_pixels(nothing, normalization)).max())  # pixels a unit of the input
    tolerance = (NOISE_REACH * LARGEST_LEVEL * slope * noise).clamp(LEAST_TOLERANCE, NEAR_LEVEL)
    extreme = ~_levels_in_use(inputs, normalization)[:, 1:-1].any(1)
    return are_near_levels(inputs, normalization, tolerance) & (extreme | (_use_many_levels(inputs, normalization) & (not few)))


def _use_many_levels(inputs: Tensor, normalization: Normalization) -> Tensor:
    return _levels_in_use(inputs, normalization).sum(1) >= min(MANY_LEVELS, inputs[0].numel() // 2 if len(inputs) else MANY_LEVELS)


def _levels_in_use(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Which levels occur in each sample: (n, 256)."""
    levels = (to_pixels(inputs, normalization) * LARGEST_LEVEL).round().flatten(1).clamp(0, LARGEST_LEVEL).long()  # (n, d)
    return torch.zeros(len(levels), LARGEST_LEVEL + 1, dtype=torch.bool, device=levels.device).scatter_(1, levels, True)


def levels_are_visible(noise: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Whether levels between `low` and `high` show through noise of that root mean square an entry (n,): (n,)."""
    return noise < VISIBLE_NOISE * float((high - low).min()) / LARGEST_LEVEL


def snap_to_levels(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Samples that lie on the levels to within rounding, exactly on them; the others as they are."""
    levels = (to_pixels(inputs, normalization) * LARGEST_LEVEL).round() / LARGEST_LEVEL
    sure = are_near_levels(inputs, normalization).reshape(-1, *[1] * (inputs.ndim - 1))
    return torch.where(sure, from_pixels(levels, normalization), inputs)
