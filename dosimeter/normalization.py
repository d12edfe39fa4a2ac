"""Between pixels in [0, 1] and the scale that the model takes."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.types import Normalization


def to_pixels(inputs: Tensor, normalization: Normalization) -> Tensor:
    """Undo the normalisation: (B, channels, ...)."""
    mean, std = _per_channel(inputs, normalization)
    return inputs * std + mean


def from_pixels(pixels: Tensor, normalization: Normalization) -> Tensor:
    mean, std = _per_channel(pixels, normalization)
    return (pixels - mean) / std


def input_bounds(normalization: Normalization, like: Tensor) -> tuple[Tensor, Tensor]:
    """The images of pixel 0 and pixel 1, shaped to broadcast against `like` (B, channels, ...)."""
    mean, std = _per_channel(like, normalization)
    return -mean / std, (1 - mean) / std


def _per_channel(like: Tensor, normalization: Normalization) -> tuple[Tensor, Tensor]:
    shape = (1, -1) + (1,) * (like.ndim - 2)
    mean = torch.tensor(normalization.mean, dtype=like.dtype, device=like.device).reshape(shape)
    std = torch.tensor(normalization.std, dtype=like.dtype, device=like.device).reshape(shape)
    return mean, std
