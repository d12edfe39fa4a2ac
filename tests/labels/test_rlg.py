"""RLG: linear programs that cut present classes off."""

import numpy as np
import pytest
import torch
from torch import nn

from dosimeter.labels import rlg
from dosimeter.runs.server import recover_labels
from dosimeter.types import Refused


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_present_classes_are_found_whatever_the_sign_of_the_features(expose, activation):
    estimate = recover_labels(expose([0, 7, 7, 19], classes=30, activation=activation), "rlg")
    assert torch.nonzero(estimate.counts).flatten().tolist() == [0, 7, 19]
    assert estimate.counts.sum() == 4


def test_the_true_error_rows_satisfy_the_programs_constraints(expose, inputs):
    """The separation found for a present class is at least what its own sample's error row offers."""
    exposure = expose([0, 7, 7, 19], classes=30)
    scores = recover_labels(exposure, "rlg").scores
    errors = torch.softmax(exposure.model(inputs(4)).detach().double(), 1) - nn.functional.one_hot(torch.tensor([0, 7, 7, 19]), 30)
    left, _, _ = torch.linalg.svd(exposure.update["2.weight"].double(), full_matrices=False)
    direction = errors[3] @ left[:, :4]  # r with r·Q = error row of class 19
    assert float(scores[19]) >= float(-errors[3, 19] / direction.abs().max()) * (1 - 1e-4)


def test_a_full_rank_gradient_is_refused_and_as_published_finds_every_class(expose):
    exposure = expose(list(range(5)) * 4, classes=6)
    with pytest.raises(Refused, match=r"below min\(classes − 1, features\) = 5"):
        recover_labels(exposure, "rlg")
    assert recover_labels(exposure, "rlg", as_published=True).counts.tolist() == [1] * 6


def test_without_a_batch_size_each_present_class_counts_once(expose):
    assert recover_labels(expose([0, 7, 7, 19], classes=30, declare=False), "rlg").labels.tolist() == [0, 7, 19]


def test_a_zero_gradient_is_refused(expose):
    exposure = expose([0, 7], classes=30)
    for change in exposure.update.values():
        change.zero_()
    with pytest.raises(Refused, match="stands above rounding"):
        recover_labels(exposure, "rlg")


@pytest.mark.parametrize(("labels", "classes"), [([0, 7, 7, 19], 30), ([3], 12), (list(range(12)), 40), ([5, 5, 5], 20)])
def test_classes_proved_inseparable_together_have_separation_zero_alone(expose, labels, classes):
    """Reference: the linear program of every class."""
    directions = rlg._directions(expose(labels, classes=classes).update["2.weight"], len(set(labels)))
    proved = rlg._inseparable(directions)
    alone = [rlg._separation(directions, label) for label in range(classes)]
    assert proved.sum() >= classes - 2 * len(labels)
    assert max(alone[label] for label in range(classes) if proved[label]) < 1e-6
    assert not proved[labels].any()


def test_columns_in_a_half_space_prove_nothing():
    directions = torch.rand(3, 20, dtype=torch.float64).numpy() + 0.1
    assert not rlg._inseparable(directions).any()
    assert not rlg._inseparable(np.eye(4)).any()
