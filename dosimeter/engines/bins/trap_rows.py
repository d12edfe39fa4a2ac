"""Rows that fire for few inputs each: half of their weights negative, and the negative half slightly heavier."""

from __future__ import annotations

import copy
import math

import torch
from torch import Generator, Tensor, nn

STRENGTH = 0.01  # how far an inserted layer's answers move the input
CONTRAST = 0.45  # standard deviation over mean of a natural image's pixels


class TrapLayer(nn.Module):
    """Linear rows before the first layer of a model; row l adds its answer to input entry l, and the model goes on from there.

    Since every row leads to an entry of its own, a sample's derivative differs from row to row, and two rows that weigh
    their samples alike hold one sample.
    """

    def __init__(self, rows: nn.Linear, body: nn.Module) -> None:
        super().__init__()
        self.rows, self.body = rows, body

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        if flat.shape[1] != self.rows.in_features:
            shape = tuple(inputs.shape[1:])
            raise ValueError(f"input_shape: the layer was inserted for {self.rows.in_features} inputs, got {flat.shape[1]}, shape {shape}")
        answers = self.rows(flat).relu()
        entries = torch.arange(self.rows.out_features, device=flat.device)
        return self.body((flat.index_add(1, entries, STRENGTH * answers)).reshape(inputs.shape))


def plant_traps(model: nn.Module, input_shape: tuple[int, ...], rows: int, scale: float | None, expected: int, rng: Generator) -> nn.Module:
    """A copy whose first linear layer, or one inserted before a model without one, has trap rows and a bias of zero."""
    model = copy.deepcopy(model)
    name = first_linear(model, math.prod(input_shape))
    size = math.prod(input_shape)
    like = next(model.parameters())
    if name is None:
        # rows that moved the same entry would weigh samples alike, and their mixtures would agree
        layer = nn.Linear(size, min(rows, size), device=like.device, dtype=like.dtype)
        planted: nn.Module = TrapLayer(layer, model).train(model.training)
    else:
        layer, planted = model.get_submodule(name), model
        assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        ratio = trap_scale(size, expected) if scale is None else scale
        layer.weight.copy_(_trap_rows(layer.out_features, size, ratio, rng).to(like))
        layer.bias = nn.Parameter(torch.zeros(layer.out_features, device=like.device, dtype=like.dtype))
    return planted


def first_linear(model: nn.Module, inputs: int) -> str | None:
    """The linear layer that takes the whole input before any other layer with weights does, by its name."""
    weighted = ((name, module) for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), Tensor))
    name, first = next(weighted, ("", None))
    if not isinstance(first, nn.Linear) or first.in_features != inputs:
        return None
    return name if "weight" in dict(first.named_parameters(recurse=False)) else None  # where it is computed from others nothing can be set


def trap_scale(inputs: int, expected: int) -> float:
    """The s with which a row fires for one of `expected` natural images.

    Over random rows the answer to an image is normal with mean −(1 − s)(d/2) E|n| μ and deviation √d · std(pixels) per unit
    weight; its tail beyond 0 is 1/expected.
    """
    tail = float(torch.special.ndtri(torch.tensor(1 - 1 / max(expected, 2), dtype=torch.float64)))
    return 1 - tail * CONTRAST / (math.sqrt(inputs) / 2 * math.sqrt(2 / math.pi))


def _trap_rows(rows: int, size: int, scale: float, rng: Generator) -> Tensor:
    """Each row: a random half of the entries −|n|, the others s·|n| with the same magnitudes (Boenisch et al., Section 4.1)."""
    half = size // 2
    magnitudes = torch.randn(rows, half, generator=rng).abs() / math.sqrt(size)
    order = torch.rand(rows, size, generator=rng).argsort(1)
    values = torch.cat([-magnitudes, scale * magnitudes, torch.zeros(rows, size - 2 * half)], 1)
    return torch.zeros(rows, size).scatter(1, order, values)
