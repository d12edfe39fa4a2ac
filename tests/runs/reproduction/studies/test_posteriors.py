"""Probabilities of positive and negative samples, beside known ones."""

import pytest
import torch

from dosimeter.runs.reproduction.studies.posteriors import Posteriors


def test_a_head_of_zeros_gives_every_sample_the_same_probability(client_with, rng):
    found = Posteriors()(client_with(torch.rand(6, 3, generator=rng), torch.arange(6) % 2, torch.zeros(4, 3)), rng)
    assert found["positive_mean"] == found["negative_mean"] == pytest.approx(0.25)
    assert found["positive_deviation"] == pytest.approx(0, abs=1e-12)
    assert found["separated_classes"] == 0


def test_a_sure_model_separates_its_class(client_with, rng):
    features = torch.eye(3)[torch.tensor([0, 0, 1, 2])] * 20
    found = Posteriors(class_id=0)(client_with(features, torch.tensor([0, 0, 1, 2]), torch.eye(3)), rng)
    assert found["positive_mean"] == pytest.approx(1, abs=1e-6)
    assert found["separation"] == 1
    assert found["separated_classes"] == 1


def test_a_class_without_two_samples_has_no_number(client_with, rng):
    found = Posteriors(class_id=2)(client_with(torch.rand(3, 3, generator=rng), torch.arange(3), torch.eye(3)), rng)
    assert set(found.values()) == {None}
