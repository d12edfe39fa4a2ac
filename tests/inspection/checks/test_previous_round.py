"""A model that does not follow from the one of the round before."""

import copy
import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.checks.previous_round import measure
from dosimeter.inspection.thresholds import THRESHOLDS


@pytest.mark.parametrize("replaced", [0, 6, 24])
def test_the_statistic_is_the_share_of_rows_that_were_drawn_anew(perceptron, received, replaced) -> None:
    before = perceptron()
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[1].weight[:replaced] = perceptron(seed=1)[1].weight[:replaced]
    assert measure(received(after, before))[0] == pytest.approx(replaced / 24)


def test_a_filter_and_a_new_layer_are_found(perceptron, received) -> None:
    before = perceptron()
    filtered = dm.attack("gradfilt", targets=(2,), camouflage=1.0, input_shape=(3, 16, 16)).tamper(before)
    assert measure(received(filtered, before))[0] > THRESHOLDS["previous_round"]
    inserted = dm.attack("imprint", bins=50, input_shape=(3, 16, 16)).tamper(before)
    assert measure(received(inserted, before))[0] == math.inf


def test_training_that_turns_every_row_is_honest(perceptron, received) -> None:
    """What training adds is orthogonal to the old row: the cosine falls to 0.2, and the new row still contains the old one."""
    before = perceptron()
    after = copy.deepcopy(before)
    with torch.no_grad():
        weight = after[1].weight
        step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
        step -= (step * weight).sum(1, keepdim=True) / weight.square().sum(1, keepdim=True) * weight
        weight += 5 * step / step.norm(dim=1, keepdim=True) * weight.norm(dim=1, keepdim=True)
    assert nn.functional.cosine_similarity(after[1].weight, before[1].weight).max().item() < 0.2
    assert measure(received(after, before))[0] == 0.0


def test_it_needs_the_model_of_the_round_before(perceptron, received) -> None:
    assert "round before" in measure(received(perceptron()))
