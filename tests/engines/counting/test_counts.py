"""Whole counts: the exact nearest ones, against brute force."""

import itertools

import pytest
import torch

from dosimeter.engines.counting.counts import apportion, labels_of, nearest_counts, present_classes, whole_number_confidence
from dosimeter.types import Outcome


@pytest.mark.parametrize("seed", range(20))
def test_nearest_counts_equal_brute_force(seed):
    rng = torch.Generator().manual_seed(seed)
    estimate = 3 * torch.randn(4, generator=rng, dtype=torch.float64)
    total = int(torch.randint(0, 7, (), generator=rng))
    best = min(
        sum((n - float(x)) ** 2 for n, x in zip(counts, estimate))
        for counts in itertools.product(range(total + 1), repeat=4)
        if sum(counts) == total
    )
    counts = nearest_counts(estimate, total)
    assert counts.sum() == total
    assert bool((counts >= 0).all())
    assert float((counts - estimate).square().sum()) == pytest.approx(best)


def test_nearest_counts_leave_whole_numbers_alone_and_place_remainders_by_size():
    assert nearest_counts(torch.tensor([4.0, 2.0, 2.0, 0.0]), 8).tolist() == [4, 2, 2, 0]
    assert nearest_counts(torch.tensor([2.4, 1.3, 0.3]), 4).tolist() == [3, 1, 0]
    assert nearest_counts(torch.tensor([float("nan"), 5.0]), 2).tolist() == [0, 2]


def test_nearest_counts_of_many_rows_at_once_equal_one_by_one():
    estimate = 5 * torch.randn(50, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    floor = torch.ones(9)
    together = nearest_counts(estimate, 20, at_least=floor)
    assert torch.equal(together, torch.stack([nearest_counts(row, 20, at_least=floor) for row in estimate]))
    assert int(together.min()) == 1


def test_ties_are_broken_towards_the_first_class_and_the_sum_still_holds():
    assert nearest_counts(torch.zeros(5), 3).tolist() == [1, 1, 1, 0, 0]


def test_more_placed_than_there_are_is_refused():
    with pytest.raises(ValueError, match="3 samples are already placed, more than the 2"):
        nearest_counts(torch.zeros(3), 2, at_least=torch.ones(3))


def test_apportion_gives_each_present_class_one_and_the_rest_by_weight():
    present = torch.tensor([True, False, True, True])
    assert apportion(torch.tensor([4.0, 9.0, 2.0, 2.0]), present, 8).tolist() == [4, 0, 2, 2]
    assert apportion(torch.tensor([9.0, 9.0, 0.1, 0.1]), present, 3).tolist() == [1, 0, 1, 1]
    assert apportion(torch.tensor([1.0, 9.0, 3.0, 2.0]), present, 2).tolist() == [1, 0, 1, 1]
    assert apportion(torch.tensor([1.0, 9.0, 3.0, 2.0]), present, None).tolist() == [1, 0, 1, 1]


def test_where_no_class_is_present_one_is_taken():
    scores = torch.tensor([-1.0, -1.0, -3.0])
    estimate = present_classes(scores, scores > 0, scores, 4, once=False, rule="shows")
    assert estimate.counts.tolist() == [4, 0, 0]
    assert estimate.outcome is Outcome.AMBIGUOUS


def test_labels_are_the_counts_written_out():
    assert labels_of(torch.tensor([0, 2, 0, 1])).tolist() == [1, 1, 3]


def test_confidence_falls_with_the_distance_to_whole_numbers():
    counts = torch.tensor([1, 2])
    assert whole_number_confidence(torch.tensor([1.0, 2.0]), counts) == 1
    assert whole_number_confidence(torch.tensor([1.25, 1.75]), counts) == 0.5
    assert whole_number_confidence(torch.tensor([1.6, 1.4]), counts) == 0
