"""Pictures have 256 levels a pixel. One picture lies on these levels; a mixture of two lies between them."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.types import Normalization

LARGEST_LEVEL = 255
NEAR_LEVEL = 0.1  # largest distance to a level, in levels
LEAST_TOLERANCE = 0.02  # that distance if there is hardly any noise
VISIBLE_NOISE = 0.02  # root mean square of noise, in levels, that nowhere reaches NEAR_LEVEL
NOISE_REACH = 6.0  # the largest error of a pixel, in root mean squares of the noise
MANY_LEVELS = 32  # different levels in use from which they show one picture


def are_near_levels(inputs: Tensor, normalization: Normalization, tolerance: Tensor | float = NEAR_LEVEL) -> Tensor:
    """Whether all pixels of each sample (n, channels, ...) lie close to 8-bit levels and are not all equal: (n,)."""
    scaled = to_pixels(inputs, normalization) * LARGEST_LEVEL
    off = (scaled - scaled.round().clamp(0, LARGEST_LEVEL)).abs().flatten(1).amax(1)  # beyond black and white there is no level
    return (off < tolerance) & (scaled.flatten(1).amax(1) - scaled.flatten(1).amin(1) > 1)


def have_few_levels(inputs: Tensor, normalization: Normalization) -> bool:
    """Whether most of the samples (n, channels, ...) that lie on levels use few of them."""
    near = inputs[are_near_levels(inputs, normalization)]
    return len(near) > 0 and float(_use_many_levels(near, normalization).double().mean()) <= 0.5


def are_single_pictures(inputs: Tensor, normalization: Normalization, noise: Tensor, *, few: bool) -> Tensor:
    """Whether its levels show each sample (n, channels, ...) to be one picture: (n,). `noise` (n,) is its root mean square an entry.

    A mixture of shares λ and 1 − λ lies λ d off a level of its second picture, where the first is d levels away. All these distances are
    whole numbers by chance once in 255 / (2 · tolerance · g) mixtures, with g the step between the levels in use: once in five for
    pictures in black and white. Pictures that use `few` levels therefore show nothing, unless all their pixels are black or white: a
    mixture has others.
    """
    nothing = inputs.new_zeros(1, *inputs.shape[1:])
    slope = float((to_pixels(nothing + 1, normalization) - to_pixels(nothing, normalization)).max())  # pixels a unit of the input
    tolerance = (NOISE_REACH * LARGEST_LEVEL * slope * noise).clamp(LEAST_TOLERANCE, NEAR_LEVEL)
    extreme = ~_levels_in_use(inputs, normalization)[:, 1:-1].any(1)
    return are_near_levels(inputs, normalization, tolerance) & (extreme | (_use_many_levels(inputs, normalization) & (not few)))


def _use_many_levels(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Whether each sample uses many levels, for its number of entries: (n,)."""
    return _levels_in_use(inputs, normalization).sum(1) >= min(MANY_LEVELS, inputs[0].numel() // 2 if len(inputs) else MANY_LEVELS)


def _levels_in_use(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Which levels occur in each sample: (n, 256)."""
    levels = (to_pixels(inputs, normalization) * LARGEST_LEVEL).round().flatten(1).clamp(0, LARGEST_LEVEL).long()  # (n, d)
    return torch.zeros(len(levels), LARGEST_LEVEL + 1, dtype=torch.bool, device=levels.device).scatter_(1, levels, True)


def levels_are_visible(noise: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Whether noise of this root mean square (n,) is small enough to show levels between `low` and `high`: (n,)."""
    return noise < VISIBLE_NOISE * float((high - low).min()) / LARGEST_LEVEL


def snap_to_levels(inputs: Tensor, normalization: Normalization) -> Tensor:
    """The samples, with those close to levels moved exactly onto them."""
    levels = (to_pixels(inputs, normalization) * LARGEST_LEVEL).round() / LARGEST_LEVEL
    sure = are_near_levels(inputs, normalization).reshape(-1, *[1] * (inputs.ndim - 1))
    return torch.where(sure, from_pixels(levels, normalization), inputs)
