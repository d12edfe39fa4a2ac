"""Distances: their values by hand, their zeros, and what weights do."""

import math

import pytest
import torch

from dosimeter.engines.matching.distances import Cosine, Distance, GaussianKernel, SquaredError

GUESS = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
TARGET = [torch.tensor([2.0, 0.0]), torch.tensor([[1.0]])]


@pytest.mark.parametrize("distance", [SquaredError(), SquaredError(relative=True), Cosine(), Cosine(per_layer=True), GaussianKernel()])
def test_equal_updates_are_at_distance_zero(distance: Distance) -> None:
    assert float(distance(TARGET, TARGET)) == pytest.approx(0.0, abs=1e-6)


def test_squared_error_by_hand() -> None:
    assert float(SquaredError()(GUESS, TARGET)) == 1 + 4 + 4
    assert float(SquaredError(relative=True)(GUESS, TARGET)) == pytest.approx(9 / 5)
    assert float(SquaredError()(GUESS, TARGET, torch.tensor([1.0, 0.5]))) == 1 + 4 + 2
    assert SquaredError().scale(TARGET) == 5


def test_cosine_by_hand() -> None:
    assert float(Cosine()(GUESS, TARGET)) == pytest.approx(1 - (2 + 3) / math.sqrt(14 * 5))
    assert float(Cosine(per_layer=True)(GUESS, TARGET)) == pytest.approx((1 - 2 / math.sqrt(5 * 4)) + 0)
    assert float(Cosine()(GUESS, TARGET, torch.tensor([1.0, 0.0]))) == pytest.approx(1 - 2 / math.sqrt(5 * 4))


def test_cosine_ignores_length_and_survives_a_zero_guess() -> None:
    assert float(Cosine()([7 * layer for layer in GUESS], TARGET)) == pytest.approx(float(Cosine()(GUESS, TARGET)))
    zero = [torch.zeros(2, requires_grad=True), torch.zeros(1, 1)]
    value = Cosine()(zero, TARGET)
    assert float(value.detach()) == 1.0
    assert torch.isfinite(torch.autograd.grad(value, zero[0])[0]).all()


def test_gaussian_kernel_by_hand_and_its_width() -> None:
    layer = [torch.tensor([1.0, 3.0])], [torch.tensor([2.0, 6.0])]  # mean squared error 5, variance 4
    assert float(GaussianKernel()(*layer)) == pytest.approx(1 - math.exp(-5 / 4))
    assert float(GaussianKernel(width=2.0)(*layer)) == pytest.approx(1 - math.exp(-5 / 8))
