"""Relative feature error, against numpy and by hand."""

import numpy as np
import pytest
import torch

from dosimeter.registry import METRICS


def test_is_numpys_ratio_of_norms():
    recovered, truth = torch.randn(2, 6, 17, generator=torch.Generator().manual_seed(9)).double()
    expected = np.linalg.norm((recovered - truth).numpy(), axis=1) / np.linalg.norm(truth.numpy(), axis=1)
    assert METRICS.build("feature_error")(recovered, truth).tolist() == pytest.approx(expected.tolist())


def test_the_zero_vector_scores_one_and_a_dead_truth_is_found_or_not():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    recovered = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    assert METRICS.build("feature_error")(recovered, truth).tolist() == [1.0, 0.0, float("inf")]


def test_an_error_below_float32_is_seen_in_float64():
    truth = torch.ones(1, 4, dtype=torch.float64)
    assert METRICS.build("feature_error")(truth * (1 + 1e-11), truth).tolist() == pytest.approx([1e-11], rel=1e-4)


def test_refuses_other_features():
    with pytest.raises(ValueError, match="feature_error: expected as many recovered rows"):
        METRICS.build("feature_error")(torch.zeros(2, 3), torch.zeros(2, 4))
