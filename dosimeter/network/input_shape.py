"""Which inputs a model takes, where nobody says: the smallest common shape that passes through it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from dosimeter.network.copies import deep_copy
from dosimeter.network.head import locate_head
from dosimeter.options import first_line, mismatch
from dosimeter.types import Refused

SMALL_SIZES = (32, 28, 8, 64, 224, 16, 25, 96, 128)  # tried first, in this order
LARGE_SIZES = (224, 299, 256, 128, 96, 64)  # for stems that take away most of the resolution at once
LARGEST = 299


def find_input_shape(model: nn.Module) -> tuple[int, ...]:
    """The shape of one input. A network that pools globally takes any size: 224 behind a stem of 7x7 and more, else 32."""
    try:
        ghost = deep_copy(model).to("meta").eval()
    except (RuntimeError, ValueError) as error:
        raise Refused(
            f"input_shape: cannot be found for this model ({first_line(error)}); pass it, such as input_shape=(3, 32, 32)"
        ) from error
    for shape in _candidates(model):
        if _passes(ghost, shape):
            return shape
    raise Refused("input_shape: no common shape passes through this model; pass it, such as input_shape=(3, 32, 32)")


def find_head_name(model: nn.Module, input_shape: tuple[int, ...] | None) -> str:
    """The name of the last linear layer, proved on probes."""
    shape = input_shape or find_input_shape(model)
    try:
        return locate_head(model, shape)[0]
    except RuntimeError as error:
        raise mismatch("attack.input_shape", "the shape of one input of the model", f"{shape}: {error}") from error


def _candidates(model: nn.Module) -> Iterator[tuple[int, ...]]:
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)), None)
    if isinstance(first, nn.Conv2d):
        coarse = max(first.kernel_size) >= 7 and max(first.stride) >= 2
        preferred = LARGE_SIZES if coarse else SMALL_SIZES
        yield from ((first.in_channels, size, size) for size in dict.fromkeys((*preferred, *range(1, LARGEST + 1))))
    elif isinstance(first, nn.Linear):
        for channels in (3, 1):
            size = math.isqrt(first.in_features // channels)
            if channels * size**2 == first.in_features:
                yield channels, size, size
        yield (first.in_features,)
        yield from ((channels, size, size) for channels in (3, 1) for size in SMALL_SIZES)  # patches that a linear layer embeds


def _passes(ghost: nn.Module, shape: tuple[int, ...]) -> bool:
    parameter = next(ghost.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    try:
        with torch.no_grad():
            output = ghost(torch.empty(2, *shape, device="meta", dtype=dtype))
    except Exception:  # a model refuses a shape in its own way, timm's by an assertion
        return False
    return isinstance(output, torch.Tensor) and output.ndim == 2 and len(output) == 2
