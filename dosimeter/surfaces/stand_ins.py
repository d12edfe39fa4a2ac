"""Samples for a null where nobody has samples of the client's kind: drawn ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import interpolate

from dosimeter.network.random_texts import random_texts
from dosimeter.network.token_inputs import are_tokens, blank_of
from dosimeter.normalization import from_pixels
from dosimeter.types import Normalization

STAND_INS = 64  # that an estimate is compared with
COARSEST_FIELDS = (1, 2, 4, 8)  # rows and columns of random levels that are blown up to a picture; the last kind is plain noise
COLOUR_SHARE = 0.3  # of a channel's own field beside the field that all channels share


def stand_ins_for(model: nn.Module, inputs: Any, count: int, normalization: Normalization, rng: Generator) -> Any:
    """Samples of the same shape as `inputs` that are of no client's kind: drawn pictures, or tokens drawn from the whole vocabulary."""
    shape = tuple(inputs.shape[1:])
    if not are_tokens(inputs):
        return from_pixels(draw_stand_ins(shape, count, rng), normalization)
    return random_texts(model, blank_of(inputs), count, rng)


def draw_stand_ins(shape: tuple[int, ...], count: int, rng: Generator) -> Tensor:
    """Random samples in [0, 1]: flat, shaded, blotched and noisy pictures in turn, or noise of random level: (count, *shape).

    Real samples scatter in brightness and contrast first. So do these. They are of no client's kind, and no test is exact with them.
    """
    level = torch.rand(count, *[1] * len(shape), generator=rng)
    contrast = torch.rand(count, *[1] * len(shape), generator=rng)
    if len(shape) != 3:
        return (level + contrast * (torch.rand(count, *shape, generator=rng) - 0.5)).clamp(0, 1)
    kinds = len(COARSEST_FIELDS) + 1
    channels, height, width = shape
    fields = torch.empty(count, *shape)
    turn = torch.arange(count) + torch.randint(kinds, (), generator=rng)
    for kind in range(kinds):
        chosen = (turn % kinds == kind).nonzero().flatten()
        side = COARSEST_FIELDS[kind] if kind < len(COARSEST_FIELDS) else None
        size = (height, width) if side is None else (min(side, height), min(side, width))
        drawn = torch.rand(len(chosen), channels + 1, *size, generator=rng) - 0.5
        coarse = (1 - COLOUR_SHARE) * drawn[:, :1] + COLOUR_SHARE * drawn[:, 1:]
        if len(chosen):
            fields[chosen] = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    return (level + contrast * fields).clamp(0, 1)
