"""Posterior probabilities of auxiliary samples: Theorem 2 for every loss and activation."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import softmax

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, Focal
from dosimeter.runs.server import recover_labels
from dosimeter.types import Batch, Refused

LABELS = [0, 0, 0, 3, 3, 8, 9, 9]
COUNTS = [3, 0, 0, 2, 0, 0, 0, 0, 1, 2]
LOSSES = [
    CrossEntropy(temperature=0.8),
    CrossEntropy(smoothing=0.25),
    CrossEntropy(smoothing=0.25, convention="thesis"),
    Focal(gamma=2.0, temperature=1.2),
    BinaryCrossEntropy(),
]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.SELU])
def test_counts_come_back_whatever_the_activation(expose, activation):
    assert recover_labels(expose(LABELS, activation=activation, auxiliary_per_class=20), "posterior").counts.tolist() == COUNTS


@pytest.mark.parametrize("loss", LOSSES)
def test_counts_come_back_under_every_loss(expose, loss):
    exposure = expose(LABELS, loss=loss, auxiliary_per_class=20)
    assert recover_labels(exposure, "posterior").counts.tolist() == COUNTS
    assert recover_labels(exposure, "posterior", as_published=True).counts.tolist() == COUNTS


def test_weights_of_classes_ask_for_each_negatives_own_weight(expose):
    """Theorem 2 weighs a class's negative samples with the class's own α_j, which is right for equal weights alone."""
    exposure = expose(LABELS, loss=Focal(alpha=(0.5, 1.0, 2.0, 0.25, 1.0, 1.0, 1.0, 1.0, 3.0, 0.5)), auxiliary_per_class=20)
    assert recover_labels(exposure, "posterior").counts.tolist() == COUNTS
    assert recover_labels(exposure, "posterior", as_published=True).counts.tolist() != COUNTS


def test_the_estimate_is_equation_3_19(expose):
    smoothing = 0.1
    exposure = expose(LABELS, loss=CrossEntropy(smoothing=smoothing, convention="thesis", temperature=1.3), auxiliary_per_class=6)
    samples, targets = exposure.auxiliary.inputs, exposure.auxiliary.targets
    p = softmax(exposure.model(samples).detach().double() / 1.3, 1)
    positive = torch.stack([p[targets == j, j].mean() for j in range(10)])
    negative = torch.stack([p[targets != j, j].mean() for j in range(10)])
    gradient = exposure.update["2.bias"].double() * 1.3
    top, bottom = 1 - smoothing, smoothing / 9
    formula = 8 * ((negative - bottom) - gradient) / ((negative - bottom) - (positive - top))
    assert torch.allclose(recover_labels(exposure, "posterior").scores, formula, atol=1e-5)


def test_classes_without_auxiliary_samples_take_the_mean_sample(expose):
    exposure = expose(LABELS, auxiliary_per_class=20)
    known = exposure.auxiliary.targets < 8
    partial = replace(exposure, auxiliary=Batch(exposure.auxiliary.inputs[known], exposure.auxiliary.targets[known]))
    assert recover_labels(partial, "posterior").counts.tolist() == COUNTS


def test_one_logit_counts_no_and_yes(expose, inputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)).eval()
    exposure = expose([0, 1, 1, 1, 0, 1], loss=BinaryCrossEntropy(), model=model)
    exposure = replace(exposure, auxiliary=Batch(inputs(40, 5), torch.arange(40) % 2))
    assert recover_labels(exposure, "posterior").counts.tolist() == [2, 4]


def test_an_undeclared_batch_size_is_inferred(expose):
    estimate = recover_labels(expose(LABELS, declare=False, auxiliary_per_class=20), "posterior")
    assert estimate.counts.tolist() == COUNTS


def test_auxiliary_data_of_one_class_or_none_are_refused(expose, inputs):
    with pytest.raises(Refused, match="posterior needs auxiliary data"):
        recover_labels(expose(LABELS), "posterior")
    exposure = replace(expose(LABELS), auxiliary=Batch(inputs(4), torch.zeros(4, dtype=torch.long)))
    with pytest.raises(Refused, match="at least two classes"):
        recover_labels(exposure, "posterior")
