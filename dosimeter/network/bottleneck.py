"""How much of an input can still be in a feature: the fewest numbers that any module on the way hands on."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def narrowest(model: nn.Module, head: str, input_shape: tuple[int, ...]) -> int:
    """The fewest numbers a sample that a module without children gives before the module `head`, or that this one receives."""
    model = copy.deepcopy(model).eval()
    last, sizes = model.get_submodule(head), []
    reached = False

    def record(module: nn.Module, _: tuple, output: object) -> None:
        if not reached and isinstance(output, Tensor) and output.ndim > 1:
            sizes.append(output[0].numel())

    def arrive(_: nn.Module, received: tuple) -> None:
        nonlocal reached
        reached = True
        sizes.append(received[0][0].numel())

    last.register_forward_pre_hook(arrive)
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(record)
    with torch.no_grad():
        model(next(model.parameters()).new_zeros(2, *input_shape))
    return min(sizes, default=torch.Size(input_shape).numel())
