"""ZLG: counts from posteriors and the mean feature sum."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.functional import softmax

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, Focal
from dosimeter.network.probing import input_of
from dosimeter.runs.server import recover_labels
from dosimeter.types import Batch, Outcome, Refused

LABELS = [0, 0, 0, 3, 3, 8, 9, 9]
COUNTS = [3, 0, 0, 2, 0, 0, 0, 0, 1, 2]
LOSSES = [CrossEntropy(), CrossEntropy(smoothing=0.2), CrossEntropy(temperature=1.5), Focal(), BinaryCrossEntropy()]


@pytest.mark.parametrize("loss", LOSSES)
def test_counts_come_back_under_every_loss_of_the_theory(expose, loss):
    assert recover_labels(expose(LABELS, loss=loss, auxiliary_per_class=20), "zlg").counts.tolist() == COUNTS


def test_the_estimate_is_the_papers_formula(expose, inputs):
    exposure = expose(LABELS, auxiliary_per_class=5)
    estimate = recover_labels(exposure, "zlg").scores
    own = exposure.auxiliary.inputs
    features = input_of(exposure.model, "2", own).double()
    rows = exposure.update["2.weight"].double().sum(1)
    formula = 8 * softmax(exposure.model(own).detach().double(), 1).mean(0) - 8 * rows / features.sum(1).mean()
    assert torch.allclose(estimate, formula, atol=1e-4)


def test_dummies_serve_where_no_auxiliary_data_are_granted(expose):
    estimate = recover_labels(expose(LABELS), "zlg")
    assert estimate.counts.sum() == 8
    assert (estimate.counts - torch.tensor(COUNTS)).abs().sum() <= 4
    with pytest.raises(Refused, match="auxiliary data are not granted"):
        recover_labels(expose(LABELS), "zlg", source="auxiliary")


def test_a_batch_size_that_fits_by_chance_is_refused_and_a_guessed_one_has_no_confidence(expose):
    torch.manual_seed(2)
    few = nn.Sequential(nn.Linear(32, 30), nn.ReLU(), nn.Linear(30, 5)).eval()
    for seed in range(8):
        exposure = expose([0, 0, 0, 0, 1, 1, 2, 2], classes=5, model=few, seed=seed, auxiliary_per_class=4, declare=False)
        with suppress(Refused):
            assert recover_labels(exposure, "zlg").counts.sum() <= 8
    guessed = recover_labels(expose([*LABELS, 1, 2, 4, 5], classes=40, auxiliary_per_class=1, declare=False), "zlg")
    assert (guessed.outcome, guessed.confidence) == (Outcome.PARTIAL, None)


def test_the_clients_own_batch_as_auxiliary_gives_near_whole_numbers(expose, inputs):
    from dataclasses import replace

    exposure = replace(expose(LABELS), auxiliary=Batch(inputs(8), torch.tensor(LABELS)))
    assert recover_labels(exposure, "zlg").confidence > 0.3
