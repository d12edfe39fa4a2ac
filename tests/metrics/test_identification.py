"""Identification: laws, chance against simulation, and registration."""

import numpy as np
import pytest
import torch
from skimage.registration import phase_cross_correlation

from dosimeter.metrics.identification import Identification, probability_by_chance
from dosimeter.metrics.registration import overlay, register


@pytest.fixture
def pictures():
    rng = torch.Generator().manual_seed(3)
    coarse = torch.rand(60, 3, 8, 8, generator=rng)
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")


def distorted(pictures):
    noise = 0.1 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(1))
    shifted = torch.roll(pictures, (4, -3), (2, 3)).flip(3)
    return 0.5 + 0.4 * (shifted - 0.5) + noise


def test_shifted_mirrored_faint_and_noisy_copies_pick_their_originals(pictures):
    truth, others = pictures[:6], pictures[6:]
    assert Identification().picks(distorted(truth), truth, others).tolist() == [0, 1, 2, 3, 4, 5]
    plain = torch.cdist(distorted(truth).flatten(1), pictures.flatten(1)).argmin(1)
    assert (plain == torch.arange(6)).float().mean() < 0.5  # what a metric without registration sees


def test_copies_of_other_pictures_identify_nobody(pictures):
    assert Identification().picks(pictures[20:26], pictures[:6], pictures[6:]).min() >= 6
    assert Identification()(pictures[:6].flip(0), pictures[:6]).tolist() == [1.0] * 6  # who is whose does not matter
    same = pictures[:1].expand(6, -1, -1, -1)
    assert Identification()(same, pictures[:6]).tolist() == [1.0, 0, 0, 0, 0, 0]  # six copies of one picture identify one


def test_the_probability_is_that_of_random_private_pictures():
    rng = np.random.default_rng(0)
    hits = [np.isin(rng.permutation(50)[:8], np.arange(5)).sum() for _ in range(20_000)]  # 8 picks, 5 of 50 private
    for identified in (0, 1, 2, 3):
        assert probability_by_chance(identified, 8, 5, 50) == pytest.approx(np.mean(np.array(hits) >= identified), abs=0.012)


def test_the_gallery_grows_with_the_batch_and_ends_with_the_samples():
    metric = Identification(gallery=100)
    assert [metric.size(4, 1000), metric.size(80, 1000), metric.size(4, 20)] == [100, 160, 24]


def test_the_shift_is_the_one_that_another_implementation_finds(pictures):
    moved = torch.roll(pictures[:1], (5, -6), (2, 3))
    found = overlay(moved, pictures[:1])
    reference, _, _ = phase_cross_correlation(pictures[0].mean(0).numpy(), moved[0].mean(0).numpy())
    assert found.shift.flatten().tolist() == reference.tolist() == [-5, 6]
    assert not found.mirrored.item()


def test_a_registered_picture_lies_on_its_original(pictures):
    moved = torch.roll(pictures[:4], (5, -6), (2, 3)).flip(3)
    inside = (..., slice(7, -7), slice(7, -7))
    assert (register(moved, pictures[:4])[inside] - pictures[:4][inside]).abs().max() < 1e-6
    large = torch.nn.functional.interpolate(pictures[:2], size=(128, 128), mode="bilinear")
    shifted = register(torch.roll(large, (16, 20), (2, 3)), large)
    assert (shifted - large)[..., 24:-24, 24:-24].abs().max() < 1e-6


def test_constant_pictures_correlate_with_nothing():
    found = overlay(torch.full((1, 3, 8, 8), 0.5), torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert found.correlation.abs().max() < 1e-6


def test_other_samples_than_pictures_are_refused():
    assert "needs pictures of at least 4×4 pixels" in str(Identification().unavailable((20,)))
    with pytest.raises(ValueError, match="identification: expected as many recovered rows"):
        Identification()(torch.rand(2, 3, 8, 8), torch.rand(3, 3, 8, 8))
