"""How much of an input can still be in a feature: the fewest numbers that any module on the way hands on."""

from __future__ import annotations

import torch
from torch import nn

from dosimeter.network.probing import is_leaf, record_calls


def narrowest(model: nn.Module, head: str, input_shape: tuple[int, ...]) -> int:
    """The fewest numbers a sample that a module without children gives before the module `head`, or that this one receives."""

    def counts(name: str, module: nn.Module) -> bool:
        return name == head or (is_leaf(name, module) and not name.startswith(f"{head}."))

    probes = next(model.parameters()).new_zeros(2, *input_shape)
    _, calls = record_calls(model, probes, counts, evaluate=True)
    reached = next((index for index, call in enumerate(calls) if call.name == head), len(calls))
    sizes = [call.given[0].numel() for call in calls[:reached] if call.given.ndim > 1]
    sizes += [call.received[0].numel() for call in calls[reached:] if call.name == head]
    return min(sizes, default=torch.Size(input_shape).numel())
