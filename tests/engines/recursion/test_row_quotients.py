"""Quotients of rows: samples alone are certain, mixtures never are, whether two rows agree on them or not."""

import torch

from dosimeter.engines.recursion.levels import are_near_levels, are_single_pictures, have_few_levels, levels_are_visible, snap_to_levels
from dosimeter.engines.recursion.row_quotients import find_lone_samples
from dosimeter.types import Normalization

PIXELS = Normalization()
SILENT = torch.zeros(1)


def pictures(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 6, 6), generator=torch.Generator().manual_seed(4)) / 255


def gradients(shares: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows that weigh samples (n, *shape) by `shares` (rows, n) get for their weights and biases, in single precision."""
    return (shares.double() @ samples.double().flatten(1)).float(), shares.double().sum(1).float()


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


def test_mixtures_of_few_levels_are_no_samples() -> None:
    """Of three pictures of 6 levels two fire two rows alone; a mixture, on levels by chance, is shown by one row."""
    samples = torch.randint(6, (4, 3, 6, 6), generator=torch.Generator().manual_seed(7)) / 5
    shares = torch.tensor([[1.0, 0, 0, 0], [2.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 3.0, 0, 0], [0, 0, 20 / 51, 31 / 51]])
    found, certain = find_lone_samples(*gradients(shares, samples), (3, 6, 6), PIXELS)
    assert len(found) == 3
    distance = torch.cdist(found[certain].flatten(1), samples.double().flatten(1))
    assert sorted(distance.argmin(1).tolist()) == [0, 1]
    assert float(distance.min(1).values.max()) < 1e-5


def test_levels_show_through_noise_of_a_fiftieth() -> None:
    noise = torch.tensor([0.01, 0.03]) / 255
    assert levels_are_visible(noise, torch.zeros(1), torch.ones(1)).tolist() == [True, False]


def test_a_mixture_that_two_rows_agree_on_is_refuted_by_the_levels_of_the_others() -> None:
    samples = pictures(4)
    shares = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0.3, 0.7], [0, 0, 0.6, 1.4], [0, 2.0, 0, 0]])
    found, certain = find_lone_samples(*gradients(shares, samples), (3, 6, 6), PIXELS)
    assert len(found) == 3
    distance = torch.cdist(found[certain].flatten(1), samples.double().flatten(1))
    assert int(certain.sum()) == 2
    assert float(distance.min(1).values.max()) < 1e-5
    assert sorted(distance.argmin(1).tolist()) == [0, 1]


def test_without_levels_two_rows_must_agree() -> None:
    samples = torch.rand(3, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    shares = torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0.5], [0, 1.0, 0.9]])
    found, certain = find_lone_samples(*gradients(shares, samples), (3, 6, 6), PIXELS)
    assert int(certain.sum()) == 1
    assert torch.allclose(found[certain][0], samples[0].double(), atol=1e-5)


def test_quotients_outside_the_range_and_rows_without_a_gradient_are_left_out() -> None:
    samples = pictures(2)
    shares = torch.tensor([[1.0, -0.9], [0.0, 0.0]])
    found, certain = find_lone_samples(*gradients(shares, samples), (3, 6, 6), PIXELS)
    assert len(found) == 0
    assert len(certain) == 0
