"""L1 error of soft labels, by hand and against scipy."""

import pytest
import torch
from scipy.spatial.distance import cityblock

from dosimeter.registry import METRICS


def test_by_hand():
    truth = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0], [0.7, 0.3, 0.0]])
    recovered = torch.tensor([[0.7, 0.3, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert METRICS.build("label_l1")(recovered, truth).tolist() == pytest.approx([0.0, 2.0, 0.6])


def test_is_scipys_city_block_distance():
    recovered, truth = torch.rand(2, 5, 10, generator=torch.Generator().manual_seed(15)).double().softmax(-1)
    expected = [cityblock(r.numpy(), t.numpy()) for r, t in zip(recovered, truth)]
    assert METRICS.build("label_l1")(recovered, truth).tolist() == pytest.approx(expected)


def test_refuses_class_ids():
    with pytest.raises(ValueError, match="label_l1: expected at least 2 dimensions"):
        METRICS.build("label_l1")(torch.zeros(3), torch.zeros(3))
