"""Pixels as this package keeps them: float32 in [0, 1], channels first."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dosimeter.files import check_picture
from dosimeter.memory import require_memory

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # Pillow runs other programs for some others
TILE_SIDES = (322, 323)  # the tags TileWidth and TileLength of a TIFF
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what Pillow's grayscale conversion uses


def scale_pixels(array: np.ndarray, origin: object) -> Tensor:
    """Integers 0..255 (or booleans) divided by 255, floats in [0, 1] as they are; anything else is refused."""
    if array.dtype == bool:
        array = array.astype(np.float32)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{origin}: expected pixels as numbers, got {array.dtype}")
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    limit = 1 if array.dtype.kind == "f" else 255
    if not (low >= 0 and high <= limit):  # NaN included
        kind = "floats in [0, 1], before any normalisation," if limit == 1 else "integers in 0..255"
        raise ValueError(f"{origin}: expected pixels as {kind} got {array.dtype} from {low:g} to {high:g}")
    return torch.from_numpy(np.array(array, dtype=np.float32, order="C")).div_(limit)  # always a copy


def channels_first(array: np.ndarray, origin: object) -> np.ndarray:
    """N×H×W, N×H×W×C or N×C×H×W as N×C×H×W, C being 1 or 3; where both readings fit, channels come last."""
    if array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and array.shape[3] in (1, 3):
        return np.moveaxis(array, 3, 1)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        return array
    raise ValueError(f"{origin}: expected images as N×H×W, N×H×W×C or N×C×H×W with 1 or 3 channels, got shape {array.shape}")


def decode(data: bytes, origin: object) -> Tensor:
    """An image file's bytes as (channels, H, W): upright, one channel where the file is gray, transparency dropped."""
    from PIL import Image, TiffImagePlugin

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            check_picture(*picture.size)
            if isinstance(picture, TiffImagePlugin.TiffImageFile):  # its tiles may be larger than the picture
                check_picture(*(int(picture.tag_v2.get(side, 0)) for side in TILE_SIDES))
            return from_pillow(picture)
    except Exception as error:  # damaged bytes can fail in any way, deep inside a decoder
        raise ValueError(f"{origin}: cannot be read as an image; it is damaged, truncated or of another format ({error})") from None


def from_pillow(picture: Any) -> Tensor:
    from PIL import ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits a pixel
        return scale_pixels(np.asarray(picture)[None] / 65535, "image")
    if picture.mode == "F":
        return scale_pixels(np.asarray(picture)[None], "image")
    picture = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
    array = np.asarray(picture)
    return scale_pixels(array[None] if array.ndim == 2 else np.moveaxis(array, 2, 0), "image")


def square(images: Tensor, size: int) -> Tensor:
    """The central square of each image, resized with antialiasing: (..., H, W) -> (..., size, size)."""
    height, width = images.shape[-2:]
    if height == width == size:
        return images
    require_memory(
        images.element_size() * size**2 * math.prod(images.shape[:-2]), f"{math.prod(images.shape[:-2])} planes of {size} pixels a side"
    )
    side = min(height, width)
    if side == 0:
        raise ValueError(f"expected images with pixels, got {height}×{width}")
    top, left = (height - side) // 2, (width - side) // 2
    images = images[..., top : top + side, left : left + side]
    flat = images.reshape(-1, 1, side, side) if images.ndim != 4 else images
    resized = functional.interpolate(flat, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    return resized.clamp_(0, 1).reshape(*images.shape[:-2], size, size)


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Gray to RGB by repetition, RGB to gray by luma: (..., C, H, W) -> (..., channels, H, W)."""
    have = images.shape[-3]
    if have == channels:
        return images
    if (have, channels) == (1, 3):
        return images.repeat_interleave(3, dim=-3)
    if (have, channels) == (3, 1):
        weights = torch.tensor(LUMA, dtype=images.dtype, device=images.device).reshape(3, 1, 1)
        return (images * weights).sum(dim=-3, keepdim=True).clamp_(0, 1)
    raise ValueError(f"channels: expected 1 or 3, got {channels} asked of images with {have}")
