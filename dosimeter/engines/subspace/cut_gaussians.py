"""Means and variances of Gaussians between two bounds, and of their rectified values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FARTHEST_BOUND = 30.0  # standard deviations beyond which a Gaussian's tail is not computed


def truncated_moments(mean: Tensor, variance: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of Gaussians cut to [low, high]."""
    mean, variance, _ = _moments_between(mean, variance, low, high)
    return mean, variance


def rectified_moments(
    seen: Tensor, noise: Tensor, expected: Tensor, prior: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of f = max(0, a), and of a, where a ~ N(expected, prior), f was `seen` with `noise`, and low ≤ f ≤ high.

    The posterior mixes two cut Gaussians: a < 0 with f = 0, and a > 0 with f = a. Their weights are how well each explains `seen`.
    """
    variance = 1 / (1 / noise + 1 / prior)
    above, spread, mass = _moments_between(variance * (seen / noise + expected / prior), variance, low.clamp_min(0), high)
    below, doubt, dead = _moments_between(expected, prior.expand_as(expected), torch.full_like(low, -torch.inf), torch.zeros_like(low))
    total = noise + prior
    on = mass - (seen - expected).square() / (2 * total) - total.log() / 2
    off = torch.where(low > 0, -torch.inf, dead - seen.square() / (2 * noise) - noise.log() / 2)
    share = torch.sigmoid(on - off)  # the probability that f > 0
    mean, latent = share * above, share * above + (1 - share) * below
    of_mean = share * (spread + above.square()) - mean.square()
    of_latent = share * (spread + above.square()) + (1 - share) * (doubt + below.square()) - latent.square()
    return mean, of_mean.clamp_min(1e-30), latent, of_latent.clamp_min(1e-30)


def _moments_between(mean: Tensor, variance: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and log mass of Gaussians cut to [low, high], computed in the tail that keeps its digits."""
    deviation = variance.sqrt()
    from_low, from_high = (((bound - mean) / deviation).clamp(-FARTHEST_BOUND, FARTHEST_BOUND) for bound in (low, high))
    mirrored = from_low > 0
    a, b = torch.where(mirrored, -from_high, from_low), torch.where(mirrored, -from_low, from_high)
    mass = torch.special.ndtr(b) - torch.special.ndtr(a)
    at_a, at_b = _density(a), _density(b)
    usable = mass > 1e-13
    whole = torch.where(usable, mass, 1.0)
    shift = torch.where(usable, (at_a - at_b) / whole, b)  # without any mass, the bound nearer to the mean
    shift = torch.minimum(torch.maximum(shift, a), b)
    shrunk = torch.where(usable, 1 + (a * at_a - b * at_b) / whole - shift.square(), 0.0).clamp(1e-12, 1)
    log_mass = torch.where(usable, whole.log(), torch.special.log_ndtr(b))
    return mean + deviation * torch.where(mirrored, -shift, shift), variance * shrunk, log_mass


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
