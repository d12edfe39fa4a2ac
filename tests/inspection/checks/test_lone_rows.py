"""Rows of a first layer whose gradient comes from one sample alone."""

import pytest
import torch
from torch import nn

from dosimeter.client.observe import observe
from dosimeter.inspection.checks.lone_rows import measure
from dosimeter.inspection.thresholds import THRESHOLDS
from dosimeter.types import Batch


def plant_lone_rows(model: nn.Sequential, inputs: torch.Tensor, lone: int) -> None:
    """The first `lone` rows fire for the one sample that they like best, the others for all."""
    products = inputs.flatten(1) @ model[1].weight.T  # (B, k)
    with torch.no_grad():
        model[1].bias.copy_(10 - products.amin(0))
        model[1].bias[:lone] = -products.topk(2, 0).values.mean(0)[:lone]


@pytest.mark.parametrize("lone", [6, 18, 24])
def test_the_statistic_is_the_share_that_a_brute_force_gives(perceptron, received, data, lone) -> None:
    model, batch = perceptron(), data(16, 3)
    plant_lone_rows(model, batch.inputs, lone)
    updates = [observe(model, Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1])).update["1.bias"].abs() for i in range(12)]
    shares = torch.stack(updates)  # of each sample alone, (B, k)
    expected = float((shares.amax(0) >= 0.99 * shares.sum(0)).double().mean())
    assert expected >= lone / 24
    assert measure(received(model))[0] == pytest.approx(expected)


def test_traps_are_found_and_a_random_first_layer_is_not(perceptron, received, data) -> None:
    rigged = perceptron()
    plant_lone_rows(rigged, data(16, 3).inputs, 24)
    assert measure(received(rigged))[0] > THRESHOLDS["lone_rows"]
    assert measure(received(perceptron()))[0] < THRESHOLDS["lone_rows"]


def test_it_needs_data_and_a_layer_on_the_input(perceptron, received) -> None:
    assert "your data" in measure(received(perceptron(), with_data=False))
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))
    assert measure(received(convolution, with_data=False))[0] == 0.0
