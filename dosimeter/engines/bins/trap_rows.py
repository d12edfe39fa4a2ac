"""Rows that fire for few inputs each: half of their weights are negative, and the negative half is slightly heavier."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

from dosimeter.network.copies import deep_copy
from dosimeter.network.first_layer import receives_raw_input

LAYER_STRENGTH = 0.01  # factor on an inserted layer's answers: small, so that the model still works
PIXEL_CONTRAST = 0.45  # standard deviation over mean of a natural image's pixels


class TrapLayer(nn.Module):
    """Linear rows before the first layer of a model. Row l adds its answer to input entry l.

    Every row moves an entry of its own, so a sample's derivative differs from row to row. Two rows with the same mixture of samples
    therefore hold one sample.
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
        return self.body((flat.index_add(1, entries, LAYER_STRENGTH * answers)).reshape(inputs.shape))


def plant_traps(model: nn.Module, input_shape: tuple[int, ...], rows: int, scale: float | None, expected: int, rng: Generator) -> nn.Module:
    """A copy of the model with trap rows and a zero bias in its first linear layer. A model that begins otherwise gets a layer inserted."""
    model = deep_copy(model)
    name = find_first_linear(model, input_shape)
    size = math.prod(input_shape)
    like = next(model.parameters())
    if name is None:
        # one entry a row: rows that move the same entry hold the same mixture
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


def find_first_linear(model: nn.Module, input_shape: tuple[int, ...]) -> str | None:
    """The name of the linear layer that takes the whole input, once and as it is, before any other layer with weights; None without one."""
    weighted = ((name, module) for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), Tensor))
    name, first = next(weighted, ("", None))
    if not isinstance(first, nn.Linear) or first.in_features != math.prod(input_shape):
        return None
    if "weight" not in dict(first.named_parameters(recurse=False)):  # a computed weight cannot be set
        return None
    return name if receives_raw_input(model, name, input_shape) else None


def trap_scale(inputs: int, expected: int) -> float:
    """The s at which a row fires for one in `expected` natural images.

    Over random rows, the answer to an image is normal with mean −(1 − s)(d/2) E|n| μ and deviation √d · std(pixels) per unit of
    weight. The s makes its tail beyond 0 equal to 1/expected.
    """
    tail = float(torch.special.ndtri(torch.tensor(1 - 1 / max(expected, 2), dtype=torch.float64)))
    return 1 - tail * PIXEL_CONTRAST / (math.sqrt(inputs) / 2 * math.sqrt(2 / math.pi))


def _trap_rows(rows: int, size: int, scale: float, rng: Generator) -> Tensor:
    """In each row, a random half of the entries is −|n|, the other half s·|n| with the same magnitudes (Boenisch et al., Section 4.1)."""
    half = size // 2
    magnitudes = torch.randn(rows, half, generator=rng).abs() / math.sqrt(size)
    order = torch.rand(rows, size, generator=rng).argsort(1)
    values = torch.cat([-magnitudes, scale * magnitudes, torch.zeros(rows, size - 2 * half)], 1)
    return torch.zeros(rows, size).scatter(1, order, values)
