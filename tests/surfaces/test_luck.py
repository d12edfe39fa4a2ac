"""Luck: worthless guesses pass in at most the stated share, exact ones always, and neither order nor number of guesses matters."""

import itertools
import math

import pytest
import torch

from dosimeter.surfaces.luck import (
    LARGEST_CHANCE,
    chance_of_luck,
    chance_without_references,
    correct_for_attempts,
    luck_words,
)
from dosimeter.surfaces.luck import _extended_tail as extended_tail
from dosimeter.surfaces.luck import _mean_test as mean_test
from dosimeter.surfaces.luck import _simes as simes
from dosimeter.surfaces.stand_ins import draw_stand_ins


def samples(count: int, seed: int, dimensions: int = 6) -> torch.Tensor:
    return torch.randn(count, dimensions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_worthless_guesses_pass_in_at_most_the_stated_share(size):
    chances = [chance_of_luck(samples(size, 3 * s), samples(size, 3 * s + 1), samples(40, 3 * s + 2)) for s in range(200)]
    assert sum(chance <= LARGEST_CHANCE for chance in chances) <= 18  # 5 % of 200 and three standard deviations


def test_worthless_guesses_pass_in_at_most_the_stated_share_without_references():
    passed = 0
    for s in range(100):
        stand_ins = samples(64, 4 * s, 12)
        passed += (
            chance_without_references(samples(6, 4 * s + 1, 12), samples(6, 4 * s + 2, 12), stand_ins, torch.zeros(12)) <= LARGEST_CHANCE
        )
    assert passed <= 11


@pytest.mark.parametrize("size", [1, 2, 8])
def test_exact_guesses_are_no_luck(size):
    truth = samples(size, 1)
    near = truth + 1e-4 * samples(size, 2)
    assert chance_of_luck(near, truth, samples(40, 3)) < 1e-3
    assert chance_without_references(near, truth, samples(64, 4), torch.zeros(6)) < 1e-3


def test_one_exact_guess_among_many_worthless_ones_is_no_luck():
    truth = samples(8, 1)
    guesses = torch.cat([truth[3:4], samples(7, 2)])
    assert chance_of_luck(guesses, truth, samples(40, 3)) < 1e-3
    assert chance_of_luck(guesses[1:], truth, samples(40, 3)) > LARGEST_CHANCE


def test_the_order_of_guesses_and_samples_does_not_matter():
    guesses, truth, references = samples(5, 1), samples(5, 2), samples(30, 3)
    there = chance_of_luck(guesses, truth, references)
    assert chance_of_luck(guesses.flip(0), truth, references) == pytest.approx(there)
    alone = chance_without_references(guesses, truth, references, torch.zeros(6))
    assert chance_without_references(guesses.flip(0), truth.roll(2, 0), references, torch.zeros(6)) == pytest.approx(alone)


def test_a_single_sample_of_a_narrow_kind_needs_a_nearer_guess():
    """A foreign sample of the same kind is ten times nearer than what is drawn. Only what no such sample reaches is no luck."""
    center = torch.full((6,), 9.0, dtype=torch.float64)
    truth, alike = center + 0.2 * samples(1, 1), center + 0.2 * samples(1, 2)
    stand_ins = samples(64, 3)
    assert chance_without_references(alike, truth, stand_ins, torch.zeros(6)) < LARGEST_CHANCE
    assert chance_without_references(alike, truth, stand_ins, torch.zeros(6), kinship=30) > LARGEST_CHANCE
    assert chance_without_references(truth + 1e-3, truth, stand_ins, torch.zeros(6), kinship=30) < 1e-3
    both = torch.cat([truth, center + 0.2 * samples(1, 4)])
    assert chance_without_references(alike, both, stand_ins, torch.zeros(6)) > LARGEST_CHANCE


def test_more_guesses_do_not_help():
    truth, references = samples(4, 1), samples(40, 2)
    assert chance_of_luck(samples(500, 3), truth, references) > LARGEST_CHANCE
    stand_ins = draw_stand_ins((6,), 64, torch.Generator().manual_seed(1))
    assert chance_without_references(samples(500, 3), truth, stand_ins, torch.zeros(6)) > LARGEST_CHANCE


def test_knowing_the_class_is_no_leak_of_the_sample():
    """Guesses of the batch's class stand out against all references, and not against classmates."""
    center = torch.full((6,), 9.0, dtype=torch.float64)
    truth, guesses = samples(8, 1) + center, samples(8, 2) + center
    references = torch.cat([samples(30, 3), samples(30, 4) + center])
    classmates = torch.arange(60) >= 30
    assert chance_of_luck(guesses, truth, references, classmates) > LARGEST_CHANCE
    assert chance_of_luck(truth + 1e-3, truth, references, classmates) < 1e-3


def test_what_is_not_finite_is_no_guess_and_nothing_is_shown_without_guesses():
    truth, references = samples(3, 1), samples(20, 2)
    broken = torch.full((1, 6), torch.nan, dtype=torch.float64)
    assert chance_of_luck(broken, truth, references) == 1.0
    assert chance_without_references(broken, truth, references, torch.zeros(6)) == 1.0
    assert chance_of_luck(torch.cat([truth, broken]), truth, references) == chance_of_luck(truth, truth, references)
    assert chance_of_luck(truth, truth, references[:1]) == 1.0


def test_the_mean_test_agrees_with_all_divisions():
    private, references = torch.tensor([3.0, 2.0]), torch.tensor([0.5, 2.5, 1.0, -4.0, 1.5, 0.0])
    every = torch.cat([private, references])
    every = every.clamp(min=float(every.median()))
    means = [float(every[list(pair)].mean()) for pair in itertools.combinations(range(8), 2)]
    exact = sum(mean >= float(every[:2].mean()) - 1e-12 for mean in means) / len(means)
    assert mean_test(private, references) == pytest.approx(exact, abs=0.02)


def test_the_extended_tail_is_that_of_an_exponential_law():
    gains = -2.5 * torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log()
    assert extended_tail(25.0, gains) == pytest.approx(math.exp(-25 / 2.5), rel=1.0)
    largest = gains.sort().values
    assert extended_tail(25.0, largest[:-200], censored=200) == pytest.approx(math.exp(-25 / 2.5), rel=1.0)
    assert extended_tail(25.0, largest[:-200]) < 0.1 * math.exp(-25 / 2.5)


def test_simes_and_bonferroni():
    assert simes([0.01, 0.5, 0.02, 1.0]) == pytest.approx(min(0.04, 0.04, 4 * 0.5 / 3, 1.0))
    assert simes([0.03] * 5) == pytest.approx(0.03)
    assert simes([]) == 1.0
    assert correct_for_attempts(0.01, 4) == 0.04
    assert correct_for_attempts(0.5, 4) == 1.0
    assert luck_words(0.01, 1) == "as much agreement comes by luck with probability 0.01"
    assert luck_words(0.01, 4) == "as much agreement comes by luck with probability 0.04, counting 4 methods tried"
