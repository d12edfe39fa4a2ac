"""Quotients of rows: which lie in the range, which are pictures by their levels, and what lies in the column space."""

import torch

from dosimeter.engines.recursion.levels import are_near_levels, are_single_pictures, have_few_levels, levels_are_visible, snap_to_levels
from dosimeter.engines.recursion.row_quotients import SAME_QUOTIENT, find_quotients
from dosimeter.types import Normalization

PIXELS = Normalization()
SILENT = torch.zeros(1)


def pictures(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 6, 6), generator=torch.Generator().manual_seed(4)) / 255


def quotients(shares: torch.Tensor, samples: torch.Tensor, errors: torch.Tensor | None = None):
    """What rows that weigh samples (n, *shape) by `shares` (rows, n) show, in single precision."""
    weight, bias = (shares.double() @ samples.double().flatten(1)).float(), shares.double().sum(1).float()
    return find_quotients(weight, bias, torch.zeros(len(shares)) if errors is None else errors, (3, 6, 6), PIXELS)


def test_a_sample_lies_on_the_levels_and_a_mixture_between_them() -> None:
    samples = pictures(2)
    assert are_single_pictures(samples, PIXELS, SILENT, few=False).all()
    assert not are_single_pictures(0.7 * samples[:1] + 0.3 * samples[1:], PIXELS, SILENT, few=False).any()
    assert not are_single_pictures(torch.full((1, 3, 6, 6), 100 / 255), PIXELS, SILENT, few=False).any()  # a flat picture shows nothing
    off = samples + 0.05 / 255
    assert not are_single_pictures(off, PIXELS, SILENT, few=False).any()  # too far off for so little noise
    assert are_single_pictures(off, PIXELS, SILENT + 0.02 / 255, few=False).all()
    noisy = samples + 1e-5
    assert torch.equal(snap_to_levels(noisy, PIXELS), (samples * 255).round() / 255)


def test_few_levels_tell_nothing_but_black_and_white_alone() -> None:
    """Pictures of 2 and of 6 levels, and mixtures of them that lie on 8-bit levels as once in five and once in 25 by chance."""
    rng = torch.Generator().manual_seed(6)
    white, grey = torch.randint(2, (2, 3, 6, 6), generator=rng).float(), torch.randint(6, (2, 3, 6, 6), generator=rng) / 5
    for samples, share in ((white, 101 / 255), (grey, 20 / 51)):
        mixture = share * samples[:1] + (1 - share) * samples[1:]
        assert are_near_levels(mixture, PIXELS).all()
        assert not are_single_pictures(mixture, PIXELS, SILENT, few=True).any()
    assert are_single_pictures(white, PIXELS, SILENT, few=True).all()
    assert not are_single_pictures(grey, PIXELS, SILENT, few=True).any()
    assert have_few_levels(grey, PIXELS)
    assert have_few_levels(white, PIXELS)
    assert not have_few_levels(pictures(3), PIXELS)
    assert not have_few_levels(torch.rand(3, 3, 6, 6, generator=rng), PIXELS)  # nothing there lies on levels


def test_a_difference_of_pictures_is_no_picture_though_it_lies_on_whole_numbers() -> None:
    """1 + 1/255 and −1/255 are whole numbers of levels beyond white and black."""
    white, other = torch.randint(2, (2, 3, 6, 6), generator=torch.Generator().manual_seed(6)).float()
    mixture = ((1 + 1 / 255) * white - 1 / 255 * other)[None]
    assert not are_near_levels(mixture, PIXELS).any()
    assert not are_single_pictures(mixture, PIXELS, SILENT, few=True).any()


def test_levels_show_through_noise_of_a_fiftieth() -> None:
    noise = torch.tensor([0.01, 0.03]) / 255
    assert levels_are_visible(noise, torch.zeros(1), torch.ones(1)).tolist() == [True, False]


def test_lone_samples_are_pictures_and_mixtures_are_told_apart_by_the_levels_of_the_others() -> None:
    samples = pictures(4)
    shares = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0.3, 0.7], [0, 0, 0.6, 1.4], [0, 2.0, 0, 0]])
    found = quotients(shares, samples)
    assert found.pictures.tolist() == [True, False, False, True]
    assert found.mixtures.tolist() == [False, True, True, False]
    torch.testing.assert_close(found.inputs[[0, 3]], samples[:2].double(), rtol=0, atol=1e-6)
    assert (found.apart <= SAME_QUOTIENT).sum(1).tolist() == [1, 2, 2, 1]


def test_mixtures_of_few_levels_are_no_pictures() -> None:
    """A mixture of two pictures of 6 levels that lies on levels by chance."""
    samples = torch.randint(6, (4, 3, 6, 6), generator=torch.Generator().manual_seed(7)) / 5
    shares = torch.tensor([[1.0, 0, 0, 0], [2.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 3.0, 0, 0], [0, 0, 20 / 51, 31 / 51]])
    assert not quotients(shares, samples).pictures.any()


def test_rows_outside_the_range_without_a_gradient_or_with_errors_are_left_out() -> None:
    samples = pictures(2)
    assert len(quotients(torch.tensor([[1.0, -0.9], [0.0, 0.0]]), samples)) == 0
    shares = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert quotients(shares, samples).rows.tolist() == [0, 1]
    assert quotients(shares, samples, torch.tensor([0.0, 1e-3])).rows.tolist() == [0]
