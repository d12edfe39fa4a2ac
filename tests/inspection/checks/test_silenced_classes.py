"""Classes whose samples send nothing past the last layer."""

import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.checks.silenced_classes import measure
from dosimeter.inspection.thresholds import THRESHOLDS


def test_the_statistic_is_what_each_class_sends_by_hand(perceptron, received) -> None:
    model = perceptron(classes=5)
    seen = received(model, with_data=False)
    weight, mean = model[3].weight.detach().double(), torch.softmax(seen.logits.double(), 1).mean(0)
    ratios = []
    for label in range(5):
        error = mean.clone()
        error[label] -= 1
        ratios.append(float((weight.T @ error).norm() / (weight.norm() * error.norm())))
    expected = -math.log10(float(torch.tensor(ratios).quantile(0.25)) * 5**0.5)
    assert measure(seen)[0] == pytest.approx(expected, abs=1e-5)


def test_orthogonal_rows_send_as_much_as_a_random_head(perceptron, received) -> None:
    model = perceptron(classes=6)
    nn.init.orthogonal_(model[3].weight)
    assert measure(received(model, with_data=False))[0] == pytest.approx(0, abs=1e-5)  # ‖Wᵀe‖ = ‖e‖ and ‖W‖ = √C


def test_a_filter_is_found_and_an_honest_network_is_not(perceptron, received) -> None:
    model = perceptron()
    rigged = dm.attack("gradfilt", targets=(2,), input_shape=(3, 16, 16)).tamper(model)
    assert measure(received(rigged, with_data=False))[0] > THRESHOLDS["silenced_classes"]
    assert measure(received(model))[0] < THRESHOLDS["silenced_classes"]


def test_a_last_layer_of_zeros_singles_none_out(perceptron, received) -> None:
    model = perceptron()
    nn.init.zeros_(model[3].weight)
    assert "not all zero" in measure(received(model))
