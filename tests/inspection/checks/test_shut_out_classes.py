"""Classes whose biases lie far below all others."""

import pytest
import torch

import dosimeter as dm
from dosimeter.inspection.checks.shut_out_classes import measure
from dosimeter.inspection.thresholds import THRESHOLDS


@pytest.mark.parametrize("below", [1, 3, 5])
def test_the_statistic_is_the_gap_whichever_classes_lie_below_it(perceptron, received, below) -> None:
    model = perceptron()
    with torch.no_grad():
        model[3].bias.zero_()
        model[3].bias[torch.randperm(10, generator=torch.Generator().manual_seed(below))[:below]] = -6.0
    statistic, sentence = measure(received(model))
    assert statistic == pytest.approx(6.0)
    assert f"put {below} of 10 classes" in sentence


def test_a_camouflaged_filter_is_found(perceptron, received) -> None:
    rigged = dm.attack("gradfilt", targets=(4,), bias=9.0, camouflage=1.0, input_shape=(3, 16, 16)).tamper(perceptron())
    assert measure(received(rigged))[0] > THRESHOLDS["shut_out_classes"]


def test_rare_classes_and_a_dominant_one_are_honest(perceptron, received) -> None:
    rare, dominated = perceptron(), perceptron()
    with torch.no_grad():
        rare[3].bias.copy_(torch.linspace(0, -20, 10))
        dominated[3].bias.fill_(-20)[0] = 0.0
    assert measure(received(rare))[0] == pytest.approx(20 / 9, rel=1e-5)
    assert measure(received(dominated))[0] == 0.0


def test_two_classes_are_too_few(perceptron, received) -> None:
    assert "three classes" in measure(received(perceptron(classes=2), with_data=False))
