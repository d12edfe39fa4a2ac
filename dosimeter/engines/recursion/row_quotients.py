"""Quotients of a first layer's weight and bias gradients, and which of them are single samples."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.engines.recursion.levels import are_near_levels, are_single_pictures, have_few_levels, levels_are_visible
from dosimeter.normalization import input_bounds
from dosimeter.types import Normalization

SAME_QUOTIENT = 5e-5  # relative distance up to which two quotients are one input; mixtures of the same two samples come near by chance
SAME_SAMPLE = 0.05  # relative distance up to which two quotients show one sample, the noisier one included
RANGE_SLACK = 0.02  # of the data range: how far outside it an entry may lie


def find_lone_samples(
    weight_gradient: Tensor, bias_gradient: Tensor, shape: tuple[int, ...], normalization: Normalization
) -> tuple[Tensor, Tensor]:
    """Distinct inputs (n, *shape) that rows show, and whether each is certain to be one sample (n,).

    Row l has the weight gradient Σ δ_il x_i and the bias gradient Σ δ_il. Their quotient is x_i if sample i alone fires neuron l, else a
    mixture whose shares differ from row to row. A quotient is certainly one sample if two rows agree on it, or if its pixels lie on many
    of the 256 levels of a picture. Where some quotients lie on levels, one off the levels is a mixture, unless rounding noise hides its
    levels. Quotients outside the data range are left out.
    """
    weight, bias = weight_gradient.double(), bias_gradient.double()
    noise = 8 * torch.finfo(weight_gradient.dtype).eps
    shown = (bias.abs() > noise * weight.norm(dim=1)) & (weight.norm(dim=1) > 100 * noise * weight.norm(dim=1).max())
    quotients = (weight[shown] / bias[shown, None]).reshape(-1, *shape)
    errors = noise * weight[shown].norm(dim=1) / (bias[shown].abs() * weight.shape[1] ** 0.5)  # root mean square an entry
    low, high = input_bounds(normalization, quotients)
    slack = RANGE_SLACK * (high - low)
    inside = ((quotients >= low - slack) & (quotients <= high + slack)).flatten(1).all(1)
    quotients, errors = quotients[inside], errors[inside]
    if len(quotients) == 0:
        return quotients, torch.zeros(0, dtype=torch.bool, device=weight.device)
    flat = quotients.flatten(1)
    apart = torch.cdist(flat, flat, compute_mode="use_mm_for_euclid_dist") / flat.norm(dim=1)[:, None]  # float64: sound to 1e-7
    votes = (apart <= SAME_QUOTIENT).sum(1)  # itself among them
    near = are_near_levels(quotients, normalization)
    refuted = ~near & near.any() & levels_are_visible(errors, low, high)
    pictures = are_single_pictures(quotients, normalization, errors, few=have_few_levels(quotients, normalization))
    certain = pictures | ((votes >= 2) & ~refuted)
    order = (votes + len(votes) * certain).argsort(descending=True, stable=True)
    repeats = torch.tril(apart[order][:, order] <= SAME_SAMPLE, -1).any(1)
    kept = order[~repeats]
    return quotients[kept], certain[kept]
