"""Zeroed or scaled rows of the last layer."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.checks.head_rows import measure
from dosimeter.inspection.finding import NO_HEAD
from dosimeter.inspection.thresholds import THRESHOLDS


def test_the_statistic_is_the_ratio_of_the_rows_distances_from_their_mean(perceptron, received) -> None:
    model = perceptron(classes=4)
    with torch.no_grad():
        model[3].weight.copy_(torch.eye(4, 24) * torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None])
    seen = received(model, with_data=False)
    mean = torch.softmax(seen.logits.double(), 1).mean(0) @ model[3].weight.double()
    distances = torch.stack([(row - mean).norm() for row in model[3].weight.double()]).detach()
    assert measure(seen)[0] == pytest.approx(float(distances.max() / distances.quantile(0.25)))


def test_rows_scaled_alike_leave_the_statistic_where_all_probabilities_are_even(perceptron, received) -> None:
    model = perceptron()
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    nn.init.zeros_(model[3].bias)
    before = measure(received(model, with_data=False))[0]
    with torch.no_grad():
        model[3].weight.mul_(5)
    assert measure(received(model, with_data=False))[0] == pytest.approx(before, rel=1e-5)


def test_a_filter_is_found_and_an_honest_network_is_not(perceptron, received) -> None:
    model = perceptron()
    rigged = dm.attack("gradfilt", targets=(2,), input_shape=(3, 16, 16)).tamper(model)
    assert measure(received(rigged, with_data=False))[0] > THRESHOLDS["head_rows"]
    assert measure(received(model))[0] < THRESHOLDS["head_rows"]


def test_it_cannot_look_without_a_head_or_with_two_classes(perceptron, received) -> None:
    assert "3 classes" in measure(received(perceptron(classes=2), with_data=False))
    seen = received(perceptron())
    assert measure(type(seen)(**{**vars(seen), "head": None})) == NO_HEAD
