"""Biases of the last layer that decide the answer."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.checks.head_biases import measure
from dosimeter.inspection.thresholds import THRESHOLDS


def test_the_statistic_is_the_span_and_a_common_shift_does_not_change_it(perceptron, received) -> None:
    model = perceptron()
    with torch.no_grad():
        model[3].bias.copy_(torch.linspace(-1.5, 2.0, 10))
    assert measure(received(model))[0] == pytest.approx(3.5)
    with torch.no_grad():
        model[3].bias.add_(100)
    assert measure(received(model))[0] == pytest.approx(3.5, abs=1e-4)


def test_a_filter_is_found_and_an_honest_network_is_not(perceptron, received) -> None:
    model = perceptron()
    rigged = dm.attack("gradfilt", targets=(2,), bias=50.0, input_shape=(3, 16, 16)).tamper(model)
    assert measure(received(rigged))[0] == pytest.approx(50 - model[3].bias[2].item(), rel=1e-5)
    assert measure(received(model))[0] < 1 < THRESHOLDS["head_biases"] < 50


def test_a_head_without_a_bias_has_none_that_could_decide(received) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10, bias=False))
    assert measure(received(model))[0] == 0.0
