"""Cosine of features, against scipy and by hand."""

import pytest
import torch
from scipy.spatial.distance import cosine

from dosimeter.registry import METRICS


def test_is_scipys_value():
    recovered, truth = torch.randn(2, 6, 17, generator=torch.Generator().manual_seed(10)).double()
    expected = [1 - cosine(r.numpy(), t.numpy()) for r, t in zip(recovered, truth)]
    assert METRICS.build("feature_cosine")(recovered, truth).tolist() == pytest.approx(expected)


def test_does_not_see_scale_and_gives_a_zero_vector_nothing():
    truth = torch.tensor([[1.0, 0.0], [1e-12, 1e-12], [1.0, 1.0], [1.0, 1.0]])
    recovered = torch.tensor([[5.0, 0.0], [1.0, 1.0], [-1.0, 1.0], [0.0, 0.0]])
    assert METRICS.build("feature_cosine")(recovered, truth).tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])


def test_refuses_other_features():
    with pytest.raises(ValueError, match="feature_cosine: expected as many recovered rows"):
        METRICS.build("feature_cosine")(torch.zeros(2, 3), torch.zeros(2, 4))
