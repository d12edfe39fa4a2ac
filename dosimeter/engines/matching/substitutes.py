"""Functions of PyTorch without a second derivative, in forms that have one. Values and first derivatives stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """clamp(x + 3, 0, 6) / 6."""
    return (input + 3).clamp(0, 6) / 6


def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """(B, g·c, ...): the channels of all groups by turns."""
    return input.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The distances between the rows of x1 (..., n, d) and those of x2 (..., m, d): (..., n, m)."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def _functions() -> dict[Any, Callable[..., Tensor]]:
    """What is called, under all of its names, and what stands in for it."""
    core: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue] (where the functions of torch.nn.functional lead)
    named = {
        functional.hardsigmoid: hardsigmoid,
        core.hardsigmoid: hardsigmoid,
        torch.channel_shuffle: channel_shuffle,
        torch.native_channel_shuffle: channel_shuffle,
        functional.channel_shuffle: channel_shuffle,
        torch.cdist: cdist,
    }
    return named


class Substitutes(TorchFunctionMode):
    """Inside, the functions above are computed in their other form. `met` says whether any was."""

    def __init__(self) -> None:
        super().__init__()
        self.functions, self.met = _functions(), False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        other = self.functions.get(function)
        self.met = self.met or other is not None
        return (function if other is None else other)(*arguments, **(options or {}))
