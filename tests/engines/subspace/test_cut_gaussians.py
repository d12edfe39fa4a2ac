"""Gaussians between bounds."""

import pytest
import torch
from scipy.stats import truncnorm

from dosimeter.engines.subspace.cut_gaussians import truncated_moments


def test_moments_of_cut_gaussians_are_scipys():
    mean = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    variance = torch.tensor([1.0, 4.0, 0.25, 1.0, 9.0], dtype=torch.float64)
    low = torch.tensor([-1.0, 2.0, -torch.inf, 0.0, -torch.inf], dtype=torch.float64)
    high = torch.tensor([0.5, 7.0, -3.0, 1.0, torch.inf], dtype=torch.float64)
    deviation = variance.sqrt()
    reference = truncnorm((low - mean) / deviation, (high - mean) / deviation, loc=mean, scale=deviation)
    found_mean, found_variance = truncated_moments(mean, variance, low, high)
    torch.testing.assert_close(found_mean, torch.as_tensor(reference.mean()), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found_variance, torch.as_tensor(reference.var()), rtol=1e-5, atol=1e-8)


def test_bounds_far_from_the_mean_are_kept_to():
    mean, variance = torch.tensor([0.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    low, high = torch.tensor([50.0, -60.0], dtype=torch.float64), torch.tensor([51.0, -50.0], dtype=torch.float64)
    found, spread = truncated_moments(mean, variance, low, high)
    assert bool(torch.isfinite(found).all())
    assert bool((spread > 0).all())
    assert found[0] == pytest.approx(30, abs=1e-6)  # as far as the tail is computed
    assert found[1] == pytest.approx(-30, abs=1e-6)
