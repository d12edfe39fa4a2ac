"""GradInversion's label step: row minima."""

import pytest
import torch
from torch import nn

from dosimeter.client.losses import CrossEntropy
from dosimeter.runs.server import recover_labels
from dosimeter.types import Outcome, Refused


def test_presence_is_the_set_of_rows_with_a_negative_entry(expose):
    exposure = expose([2, 2, 5, 7, 7, 7])
    estimate = recover_labels(exposure, "gradinversion")
    minima = exposure.update["2.weight"].amin(1)
    assert torch.nonzero(estimate.counts).flatten().tolist() == torch.nonzero(minima < 0).flatten().tolist() == [2, 5, 7]
    assert estimate.counts.sum() == 6


def test_unique_labels_are_the_smallest_minima_each_once(expose):
    labels = [1, 4, 6, 8]
    assert recover_labels(expose(labels), "gradinversion", unique=True).labels.tolist() == labels


def test_unique_labels_are_as_many_as_the_samples_where_rows_tie_at_zero(expose):
    estimate = recover_labels(expose([2, 2, 5, 5]), "gradinversion", unique=True)
    assert len(estimate.labels) == 4
    assert int(estimate.counts.max()) == 1
    assert {2, 5} <= set(estimate.labels.tolist())


def test_negative_features_break_the_rule_and_the_estimate_says_so(expose):
    estimate = recover_labels(expose([3, 3, 4], classes=20, activation=nn.Tanh), "gradinversion")
    assert estimate.counts.tolist() == [1] * 20
    assert estimate.outcome is Outcome.AMBIGUOUS
    assert "20 classes for 3 samples" in estimate.message


def test_smoothing_is_refused(expose):
    with pytest.raises(Refused, match="reads presence off signs"):
        recover_labels(expose([1], loss=CrossEntropy(smoothing=0.1)), "gradinversion")
