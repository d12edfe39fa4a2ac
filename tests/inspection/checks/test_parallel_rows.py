"""Rows that are copies of one another with different biases."""

import pytest
import torch

import dosimeter as dm
from dosimeter.inspection.checks.parallel_rows import measure
from dosimeter.inspection.thresholds import THRESHOLDS


@pytest.mark.parametrize("copies", [4, 12, 24])
def test_the_statistic_is_the_share_of_copies(perceptron, received, copies) -> None:
    model = perceptron()
    with torch.no_grad():
        model[1].weight[:copies] = model[1].weight[0].clone() * torch.linspace(0.5, 2, copies)[:, None]
    assert measure(received(model))[0] == pytest.approx(copies / 24)


def test_bins_are_found_and_random_rows_are_not(perceptron, received) -> None:
    model = perceptron()
    rigged = dm.attack("imprint", bins=100, input_shape=(3, 16, 16)).tamper(model)
    assert measure(received(rigged))[0] > THRESHOLDS["parallel_rows"]
    assert measure(received(model))[0] == 0.0


def test_pairs_that_fire_at_one_place_are_how_honest_layers_are_widened(perceptron, received) -> None:
    model = perceptron()
    with torch.no_grad():
        model[1].weight[12:], model[1].bias[12:] = model[1].weight[:12].clone(), model[1].bias[:12].clone()
    assert measure(received(model))[0] == 0.0
    with torch.no_grad():
        model[1].bias[12:] += 1.0
    assert measure(received(model))[0] == 1.0


def test_few_rows_are_not_looked_at(perceptron, received) -> None:
    assert measure(received(perceptron(hidden=4)))[0] == 0.0
