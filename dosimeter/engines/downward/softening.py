"""Rectifiers that are soft at first, so that steps from a far guess find their way.

A guess that is far off opens and closes the wrong entries of rectifiers, and derivatives through them point nowhere. Let what a rectifier
receives be known up to a normal error of size τ. On average it gives y Φ(y / τ) + τ φ(y / τ), with the slope Φ(y / τ). This is smooth, and
tends to the rectifier with τ. Here τ is a share of the root mean square of what each rectifier receives of a sample: its `softness`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dosimeter.network.tape import RECTIFIERS, Named, Tape, Value

SOFTNESS = "softness of rectifiers"  # the name of a tensor (B,)
HARDEST = 1e-6  # share that stands for a hard rectifier beside soft ones


def soften(tape: Tape) -> Tape:
    """The tape with soft rectifiers, which take their softness from the tensors."""
    operations = [
        replace(one, function=soft_rectifier, arguments=(Value(one.sources[0]), Named(SOFTNESS)), options={})
        if one.function in RECTIFIERS
        else one
        for one in tape.operations
    ]
    return replace(tape, operations=tuple(operations))


def soft_rectifier(maps: Tensor, softness: Tensor) -> Tensor:
    """(B, ...) and (B,) -> (B, ...)"""
    fixed = maps.detach()
    units = fixed / _width(fixed, softness)
    passing = torch.special.ndtr(units)
    value = fixed * passing + _width(fixed, softness) * torch.exp(-units.square() / 2) / math.sqrt(2 * math.pi)
    return value + passing * (maps - fixed)  # so that the derivative is one product


def passing_share(maps: Tensor, softness: Tensor) -> Tensor:
    """The derivative of a soft rectifier."""
    return torch.special.ndtr(maps / _width(maps, softness))


def _width(maps: Tensor, softness: Tensor) -> Tensor:
    size = maps.flatten(1).square().mean(1).sqrt() * softness.clamp_min(HARDEST)
    return size.clamp_min(torch.finfo(maps.dtype).tiny).reshape(-1, *([1] * (maps.ndim - 1)))
