"""Levels of pictures: samples lie on them, mixtures between them, and how often a mixture passes by chance."""

import pytest
import torch

from dosimeter.engines.recursion.levels import (
    LARGEST_LEVEL,
    NEAR_LEVEL,
    are_near_levels,
    are_single_pictures,
    have_few_levels,
    levels_are_visible,
    snap_to_levels,
)
from dosimeter.types import Normalization

PIXELS = Normalization()
SCALED = Normalization(mean=(0.5,), std=(0.25,))


def pictures(count: int, levels: int = 256) -> torch.Tensor:
    rng = torch.Generator().manual_seed(9)
    return torch.randint(levels, (count, 1, 8, 8), generator=rng).double() / (levels - 1)


@pytest.mark.parametrize("normalization", [PIXELS, SCALED])
def test_pictures_are_near_levels_in_any_normalisation(normalization):
    samples = pictures(4)
    inputs = (samples - 0.5) / 0.25 if normalization is SCALED else samples
    assert are_near_levels(inputs, normalization).all()
    off = 1.5 * NEAR_LEVEL / LARGEST_LEVEL
    assert not are_near_levels(inputs + (off / 0.25 if normalization is SCALED else off), normalization).any()


def test_a_mixture_is_a_picture_by_chance_as_rarely_as_the_docstring_says():
    """Brute force over 2,000 random shares of two black-and-white pictures: near all levels once in 255/(2 · tolerance · g)."""
    first, second = pictures(2, 2)
    shares = torch.rand(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixtures = shares.view(-1, 1, 1, 1) * first + (1 - shares).view(-1, 1, 1, 1) * second
    near = float(are_near_levels(mixtures, PIXELS).double().mean())
    assert near == pytest.approx(2 * NEAR_LEVEL, abs=0.03)  # g = 255: one in five
    assert not are_single_pictures(mixtures, PIXELS, torch.zeros(2000).double(), few=True).any()
    many = pictures(2)
    mixtures = shares.view(-1, 1, 1, 1) * many[0] + (1 - shares).view(-1, 1, 1, 1) * many[1]
    assert float(are_single_pictures(mixtures, PIXELS, torch.zeros(2000).double(), few=False).double().mean()) < 0.005


def test_the_tolerance_follows_the_noise():
    samples = pictures(1)
    off = samples + 0.05 / LARGEST_LEVEL
    for noise, expected in ((0.0, False), (0.005, False), (0.01, True), (1.0, True)):
        assert bool(are_single_pictures(off, PIXELS, torch.tensor([noise / LARGEST_LEVEL]), few=False)) is expected


def test_few_levels_are_seen():
    assert have_few_levels(pictures(3, 2), PIXELS)
    assert have_few_levels(pictures(3, 6), PIXELS)
    assert not have_few_levels(pictures(3), PIXELS)
    assert not have_few_levels(pictures(0), PIXELS)


def test_visible_levels_are_fifty_times_wider_than_the_noise():
    low, high = torch.zeros(3), torch.full((3,), 2.0)
    spacing = 2 / LARGEST_LEVEL
    assert levels_are_visible(torch.tensor([0.019, 0.021]) * spacing, low, high).tolist() == [True, False]


def test_snapping_moves_pictures_onto_levels_and_leaves_others():
    samples = pictures(2)
    noisy = samples + 1e-4 * torch.sin(torch.arange(64.0)).view(1, 1, 8, 8)
    torch.testing.assert_close(snap_to_levels(noisy, PIXELS), samples, rtol=0, atol=1e-12)
    between = samples + 0.4 / LARGEST_LEVEL
    assert torch.equal(snap_to_levels(between, PIXELS), between)
    assert torch.equal(snap_to_levels(snap_to_levels(noisy, PIXELS), PIXELS), snap_to_levels(noisy, PIXELS))
