"""Empty rows: those that pruning explains do not count, those that a filter zeroed do."""

import torch

from dosimeter.inspection.pruning import rows_that_count


def test_all_rows_count_where_none_or_every_one_is_empty():
    assert rows_that_count(torch.ones(4, 3)).tolist() == [True] * 4
    assert rows_that_count(torch.zeros(4, 3)).tolist() == [True] * 4


def test_rows_that_random_pruning_empties_do_not_count():
    rng = torch.Generator().manual_seed(2)
    weight = torch.randn(4000, 4, generator=rng) * (torch.rand(4000, 4, generator=rng) < 0.5)  # a row is empty with chance 1/16
    empty = ~(weight != 0).any(1)
    assert 150 < int(empty.sum()) < 350
    assert torch.equal(rows_that_count(weight), ~empty)


def test_rows_that_a_filter_zeroed_beside_full_ones_count():
    weight = torch.ones(10, 64)
    weight[:3] = 0
    assert rows_that_count(weight).tolist() == [True] * 10
