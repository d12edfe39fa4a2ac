"""The variance loss: zero at the true scalar, and the valid range beside one derived by hand."""

import math

import pytest
import torch

from dosimeter.runs.reproduction.studies.scalar_landscape import ScalarLandscape


def test_a_smoothed_label_has_no_variance_at_the_true_scalar(client_with, rng):
    label = torch.full((1, 5), 0.05)
    label[0, 3] = 0.8
    found = ScalarLandscape()(client_with(torch.rand(1, 6, generator=rng), label, 0.1 * torch.randn(5, 6, generator=rng)), rng)
    assert found["loss_at_truth"] < 1e-6
    assert found["first_is_true"] == 1
    assert found["minima_before"] == 0


def test_the_valid_range_of_equal_probabilities_is_known(client_with, rng):
    """With W = 0 and two classes, ŷ = 1/2 − ratios/λ: none is negative where |λ| ≥ 2. At p − y = −.4 the true |λ| is 2.5."""
    label = torch.tensor([[0.9, 0.1]])
    found = ScalarLandscape(reach=4.0)(client_with(torch.rand(1, 6, generator=rng), label, torch.zeros(2, 6)), rng)
    assert found["true_scalar"] == pytest.approx(2.5, rel=1e-5)
    assert found["valid_range"] == pytest.approx(10 / 2, rel=1e-3)
    assert math.isfinite(found["loss_at_first"])
