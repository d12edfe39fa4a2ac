"""Quotients of a first layer's weight and bias gradients, and which of them agree or lie on the levels of a picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.recursion.levels import are_near_levels, are_single_pictures, have_few_levels, levels_are_visible
from dosimeter.normalization import input_bounds
from dosimeter.types import Normalization

SAME_QUOTIENT = 5e-5  # relative distance up to which two quotients may be one input, beside what noise explains
LARGEST_ERROR = 5e-4  # relative, that a defense may leave in a row that counts
NOISE_REACH = 1.5  # times the root mean square of the noise in many entries
ROUNDINGS = 8  # units in the last place of a row's gradient
RANGE_SLACK = 0.02  # of the data range: how far outside it an entry may lie


@dataclass(frozen=True, kw_only=True)
class Quotients:
    """The quotients of rows that lie in the data range.

    Row l has the weight gradient Σ δ_il x_i and the bias gradient Σ δ_il. Their quotient is x_i if sample i alone fires neuron l, else a
    mixture.
    """

    inputs: Tensor  # (n, *shape) float64
    rows: Tensor  # (n,) the row of each
    apart: Tensor  # (n, n) distances, relative to the norm of the first
    pictures: Tensor  # (n,) bool: the pixels lie on many of the 256 levels of a picture
    errors: Tensor  # (n,) relative, of each quotient, that defenses and the rounding of weights may leave
    mixtures: Tensor  # (n,) bool: the pixels lie off the levels on which others lie, and no noise hides these

    def __len__(self) -> int:
        return len(self.rows)

    def agree(self, distance: float) -> Tensor:
        """Which quotients lie within this relative distance of each other, but for noise: (n, n)."""
        return self.apart <= distance + NOISE_REACH * torch.hypot(self.errors[:, None], self.errors)


def find_quotients(
    weight_gradient: Tensor, bias_gradient: Tensor, errors: Tensor, shape: tuple[int, ...], normalization: Normalization
) -> Quotients:
    """The quotients of gradients (k, d) and (k,), of rows whose relative errors (k,) are small."""
    noise = ROUNDINGS * torch.finfo(weight_gradient.dtype).eps
    weight, bias = weight_gradient.double(), bias_gradient.double()
    sizes = weight.norm(dim=1)
    shown = (bias.abs() > noise * sizes) & (sizes > 100 * noise * sizes.max()) & (errors <= LARGEST_ERROR)
    rows = shown.nonzero().flatten()
    inputs = (weight[rows] / bias[rows, None]).reshape(-1, *shape)
    low, high = input_bounds(normalization, inputs)
    slack = RANGE_SLACK * (high - low)
    inside = ((inputs >= low - slack) & (inputs <= high + slack)).flatten(1).all(1)
    rows, inputs = rows[inside], inputs[inside]
    flat = inputs.flatten(1)
    blur = (noise + errors[rows]) * sizes[rows] / (bias[rows].abs() * flat.shape[1] ** 0.5)  # root mean square an entry
    apart = torch.cdist(flat, flat, compute_mode="use_mm_for_euclid_dist") / flat.norm(dim=1)[:, None]  # float64: sound to 1e-7
    near = are_near_levels(inputs, normalization)
    return Quotients(
        inputs=inputs,
        rows=rows,
        apart=apart,
        errors=errors[rows],
        pictures=are_single_pictures(inputs, normalization, blur, few=have_few_levels(inputs, normalization)),
        mixtures=~near & near.any() & levels_are_visible(blur, low, high),
    )
