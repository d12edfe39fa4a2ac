"""The convolutions and linear layers of a tape whose gradients were sent, by the value that they receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dosimeter.interfaces import Update
from dosimeter.network.tape import CONVOLUTIONS, Named, Operation, Tape, Value

CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One convolution. A linear layer is a kernel of 1 by 1 on a grid of one position."""

    output: int  # its value on the tape
    source: int  # the value that it receives
    weight: str  # the parameter's name
    gradient: Tensor  # (out, in / groups, k, k), in double precision
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def kernel(self) -> tuple[int, int]:
        return self.gradient.shape[2], self.gradient.shape[3]

    def patches(self, maps: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C·k·k, positions of the output)."""
        return F.unfold(maps, self.kernel, dilation=self.dilation, padding=self.padding, stride=self.stride)

    def correlate(self, maps: Tensor, kernel: Tensor) -> Tensor:
        """(B, in, H, W) and (out, in / groups, k, k) -> (B, out, h, w), as the layer itself does."""
        return F.conv2d(maps, kernel, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)


def find_layers(tape: Tape, update: Update) -> dict[int, list[Layer]]:
    """The layers by what they receive. A layer that runs twice is left out, since its gradient is a sum."""
    found: dict[int, list[Layer]] = {}
    for number, operation in enumerate(tape.operations, start=1):
        layer = _layer(number, operation, update)
        if layer is not None and tape.layer(layer.weight) == number:
            found.setdefault(layer.source, []).append(layer)
    return found


def as_grid(values: Tensor) -> Tensor:
    """(B, C) -> (B, C, 1, 1); maps stay as they are."""
    return values[:, :, None, None] if values.ndim == 2 else values


def _layer(number: int, operation: Operation, update: Update) -> Layer | None:
    if operation.function not in CONVOLUTIONS:
        return None
    given: dict[str, Any] = dict(zip(CONVOLUTION_ARGUMENTS, operation.arguments)) | operation.options
    source, weight = given["input"], given["weight"]
    if not isinstance(source, Value) or not isinstance(weight, Named) or weight.name not in update:
        return None
    gradient = update[weight.name].to(torch.float64)
    if gradient.ndim == 2:
        return _make(number, source.number, weight.name, gradient[:, :, None, None]) if len(operation.shape) == 2 else None
    dilation = _pair(given.get("dilation", 1))
    padding = given.get("padding", 0)
    if padding == "valid":
        padding = 0
    if padding == "same":
        if any(side % 2 == 0 for side in gradient.shape[2:]):
            return None
        padding = tuple(reach * (side // 2) for reach, side in zip(dilation, gradient.shape[2:]))
    return Layer(
        output=number,
        source=source.number,
        weight=weight.name,
        gradient=gradient,
        stride=_pair(given.get("stride", 1)),
        padding=_pair(padding),
        dilation=dilation,
        groups=given.get("groups", 1),
    )


def _make(output: int, source: int, weight: str, gradient: Tensor) -> Layer:
    return Layer(output=output, source=source, weight=weight, gradient=gradient, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
