"""Relative error of maps, against numpy and by hand."""

import numpy as np
import pytest
import torch

from dosimeter.registry import METRICS


def test_is_numpys_ratio_of_norms_over_channels_and_positions():
    recovered, truth = torch.randn(2, 5, 3, 4, 2, generator=torch.Generator().manual_seed(9)).double()
    difference, wanted = (recovered - truth).numpy().reshape(5, -1), truth.numpy().reshape(5, -1)
    expected = np.linalg.norm(difference, axis=1) / np.linalg.norm(wanted, axis=1)
    assert METRICS.build("map_error")(recovered, truth).tolist() == pytest.approx(expected.tolist())


def test_zeros_score_one_and_dead_maps_are_found_or_not():
    truth, recovered = torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2)
    truth[0] = torch.tensor([3.0, 4.0])
    recovered[2, 0, 0, 1] = 1.0
    assert METRICS.build("map_error")(recovered, truth).tolist() == [1.0, 0.0, float("inf")]


def test_an_error_below_float32_is_seen_in_float64():
    truth = torch.ones(1, 2, 2, 2, dtype=torch.float64)
    assert METRICS.build("map_error")(truth * (1 + 1e-11), truth).tolist() == pytest.approx([1e-11], rel=1e-4)


def test_refuses_maps_of_another_grid():
    with pytest.raises(ValueError, match="map_error: expected as many recovered"):
        METRICS.build("map_error")(torch.zeros(2, 3, 2, 2), torch.zeros(2, 3, 2, 1))
