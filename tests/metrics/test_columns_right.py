"""Columns that are right, by hand and beside a loop."""

import pytest
import torch

from dosimeter.metrics.columns_right import ColumnsRight

METRIC = ColumnsRight(sizes=(1, 2, 1, 3))


def test_columns_right_by_hand():
    truth = torch.tensor([[0.0, 1, 0, 2, 0, 1, 0]])
    mine = torch.tensor([[0.3, 0.6, 0.4, 2.4, 0.1, 0.5, 0.2]])
    assert METRIC(truth, truth).tolist() == [1.0]
    assert METRIC(mine, truth).tolist() == [0.75]  # the third column is .4 standard deviations off
    assert METRIC(1 - truth, truth).tolist() == [0.0]


def test_plain_numbers_beside_a_loop():
    one, other = (torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    wanted = [sum(abs(a - b) <= 0.5 for a, b in zip(mine, true)) / 5 for mine, true in zip(one.tolist(), other.tolist())]
    assert ColumnsRight(tolerance=0.5)(one, other).tolist() == pytest.approx(wanted)


def test_what_is_no_row_of_declared_columns_is_refused():
    assert METRIC.unavailable((7,)) is None
    assert "dm.Columns" in (METRIC.unavailable((6,)) or "")
    assert "dm.Columns" in (ColumnsRight().unavailable((7,)) or "")
    with pytest.raises(ValueError, match="columns_right"):
        METRIC(torch.zeros(2, 7), torch.zeros(1, 7))
