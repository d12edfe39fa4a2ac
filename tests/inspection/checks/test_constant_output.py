"""Probabilities that no input changes."""

import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.checks.constant_output import measure
from dosimeter.inspection.thresholds import THRESHOLDS


def test_the_statistic_is_the_spread_of_the_probabilities(perceptron, received) -> None:
    model = perceptron()
    with torch.no_grad():
        model[3].weight.mul_(20)  # so that some logit moves by more than 1
        model[3].bias.zero_()
    seen = received(model)
    zero = torch.zeros(1, 10)  # of features that are all zero
    probabilities = torch.softmax(torch.cat([seen.logits, zero]).double(), 1)
    moved = max(float(logits.max() - logits.min()) for logits in seen.logits.double().T)
    assert moved > 1
    spread = max(float(column.max() - column.min()) for column in probabilities.T)
    assert measure(seen)[0] == pytest.approx(-math.log10(spread), rel=1e-5)


def test_a_filter_is_found_and_an_honest_network_is_not(perceptron, received) -> None:
    model = perceptron()
    rigged = dm.attack("gradfilt", targets=(2,), input_shape=(3, 16, 16)).tamper(model)
    assert measure(received(rigged))[0] > THRESHOLDS["constant_output"]
    assert measure(received(model))[0] < THRESHOLDS["constant_output"]


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e3])
def test_a_network_with_small_features_passes_as_one_with_large_ones_does(perceptron, received, factor) -> None:
    model = perceptron()
    with torch.no_grad():
        model[1].weight.mul_(factor)
        model[1].bias.mul_(factor)
    assert measure(received(model))[0] < 2


def test_a_last_layer_of_zeros_hides_what_it_looks_for(perceptron, received) -> None:
    model = perceptron()
    nn.init.zeros_(model[3].weight)
    assert "last layer of zeros" in measure(received(model))
