"""iDLG: presence from the signs of gradient rows."""

import pytest
import torch
from torch import nn

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy
from dosimeter.runs.server import recover_labels
from dosimeter.types import Outcome, Refused


@pytest.mark.parametrize("label", [0, 3, 9])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.SiLU])
def test_one_sample_gives_its_label_whatever_the_activation(expose, label, activation):
    estimate = recover_labels(expose([label], activation=activation), "idlg")
    assert estimate.labels.tolist() == [label]
    assert estimate.scores.argmax() == label


def test_two_classes_are_told_apart_by_the_sign_of_the_features(expose):
    assert recover_labels(expose([1], classes=2), "idlg").labels.tolist() == [1]


def test_presence_in_a_batch_is_the_set_of_negative_row_sums(expose):
    exposure = expose([2, 2, 5, 7, 7, 7])
    estimate = recover_labels(exposure, "idlg")
    rows = exposure.update["2.weight"].sum(1)
    assert torch.nonzero(estimate.counts).flatten().tolist() == torch.nonzero(rows < 0).flatten().tolist() == [2, 5, 7]
    assert estimate.counts.sum() == 6
    assert recover_labels(exposure, "idlg", as_published=True).counts.tolist() == [0, 0, 1, 0, 0, 1, 0, 1, 0, 0]


def test_without_a_batch_size_each_present_class_counts_once(expose):
    estimate = recover_labels(expose([2, 2, 5], declare=False), "idlg")
    assert estimate.labels.tolist() == [2, 5]
    assert estimate.outcome is Outcome.PARTIAL


def test_losses_that_break_the_sign_rule_are_refused(expose):
    with pytest.raises(Refused, match=r"label smoothing 0\.1"):
        recover_labels(expose([1, 2], loss=CrossEntropy(smoothing=0.1)), "idlg")
    with pytest.raises(Refused, match="binary_cross_entropy"):
        recover_labels(expose([1, 2], loss=BinaryCrossEntropy()), "idlg")
