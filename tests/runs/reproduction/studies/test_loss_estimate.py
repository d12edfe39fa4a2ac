"""Proposition 2: exact for one sample and for equal samples, ln B for sure ones."""

import math

import pytest
import torch

from dosimeter.runs.reproduction.studies.loss_estimate import LossEstimate


def test_the_estimate_is_the_loss_of_one_sample_and_of_equal_samples(client_with, rng):
    weight = torch.randn(5, 6, generator=rng)
    for copies in (1, 4):
        found = LossEstimate()(client_with(torch.rand(1, 6, generator=rng).expand(copies, 6), torch.full((copies,), 2), weight), rng)
        assert found["loss_estimate_error"] == pytest.approx(0, abs=1e-12)


def test_samples_that_are_predicted_surely_are_missed_by_the_logarithm_of_their_number(client_with, rng):
    found = LossEstimate()(client_with(100 * torch.eye(4), torch.arange(4), torch.eye(4)), rng)
    assert found["estimate_above_loss"] == pytest.approx(math.log(4))
    assert found["loss_estimate_error"] == pytest.approx(math.log(4) ** 2)
    assert found["batch_accuracy"] == 1
