"""Rank and noise of a gradient."""

import pytest
import torch

from dosimeter.engines.subspace.spectrum import added_noise, factor, follows_rounding_of, noise_edge, rounding_unit


def product(rank: int, rows: int, columns: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """A sum of `rank` outer products whose rows sum to zero, as in a softmax gradient."""
    rng = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=rng, dtype=torch.float64)
    right = torch.randn(rank, columns, generator=rng, dtype=torch.float64)
    return ((left - left.mean(0)) @ right).to(dtype)


@pytest.mark.parametrize(("rows", "columns"), [(40, 90), (90, 40), (200, 300)])
@pytest.mark.parametrize("rank", [1, 7, 19])
def test_the_rank_of_a_rounded_product(rows, columns, rank, rng):
    gradient = product(rank, rows, columns)
    assert factor(gradient.double(), rounding_unit(gradient), rng).rank == rank


def test_the_factors_give_the_weighed_gradient_back(rng):
    gradient = product(5, 200, 300)
    found = factor(gradient.double(), rounding_unit(gradient), rng)
    again = (found.left * found.values) @ found.right / found.weights[:, None]
    torch.testing.assert_close(again, gradient.double(), rtol=0, atol=1e-5)


def test_noise_is_measured_and_lowers_the_rank(rng):
    signal = product(4, 60, 80, torch.float64)
    noise = 0.01 * torch.randn(60, 80, generator=rng, dtype=torch.float64)
    found = factor(signal + noise, rounding_unit(signal), rng)
    assert found.additive
    assert found.rank == 4
    assert found.noise == pytest.approx(0.01, rel=0.15)
    assert added_noise(signal + noise) == pytest.approx(0.01, rel=0.2)
    assert factor(signal + 1000 * noise, rounding_unit(signal), rng).rank < 4


def test_a_declared_batch_size_bounds_the_rank(rng):
    gradient = product(9, 60, 80)
    found = factor(gradient.double(), rounding_unit(gradient), rng, at_most=6)
    assert found.rank == 6
    assert found.noise > 1e-2


def test_directions_beyond_the_declared_size_are_noise_only_if_noise_can_be_that_large(rng):
    signal = product(9, 60, 80, torch.float64)
    noise = torch.randn(60, 80, generator=rng, dtype=torch.float64)
    assert factor(signal.float().double(), rounding_unit(signal.float()), rng, at_most=6).crowded
    assert factor(signal + 0.01 * noise, rounding_unit(signal), rng, at_most=6).crowded  # three samples more than declared
    assert not factor(signal + 0.01 * noise, rounding_unit(signal), rng, at_most=9).crowded
    assert not factor(signal + 3.0 * noise, rounding_unit(signal), rng, at_most=6).crowded  # the noise hides them


@pytest.mark.parametrize(
    "deviation", [lambda shape, rng: torch.rand(shape, generator=rng) - 0.5, lambda shape, rng: torch.randn(shape, generator=rng)]
)
def test_a_difference_of_weights_is_rounded_as_they_are(deviation, rng):
    weight, signal, rate = deviation((60, 80), rng), product(4, 60, 80), 1e-4
    difference = ((weight - (weight - rate * signal)) / rate).double()
    found = factor(difference, rounding_unit(difference), rng, at_most=4)
    assert follows_rounding_of(weight, difference, found)
    noisy = signal.double() + 1e-3 * torch.randn(60, 80, generator=rng, dtype=torch.float64)
    assert not follows_rounding_of(weight, noisy, factor(noisy, rounding_unit(noisy), rng, at_most=4))
    exact = signal.double()
    assert not follows_rounding_of(weight, exact, factor(exact, rounding_unit(signal), rng, at_most=4))


def test_the_numbers_in_use_are_found_out():
    values = torch.randn(10, 10)
    assert rounding_unit(values) == torch.finfo(torch.float32).eps / 2
    assert rounding_unit(values.bfloat16().float()) == torch.finfo(torch.bfloat16).eps / 2
    assert rounding_unit(values.half().float()) == torch.finfo(torch.float16).eps / 2
    assert rounding_unit(values.double() / 3) == torch.finfo(torch.float64).eps / 2


def test_the_edge_of_white_noise():
    noise = torch.randn(300, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(torch.linalg.svdvals(noise)[0]) == pytest.approx(noise_edge(1.0, 300, 500), rel=0.03)
