"""Moments of features and probabilities, beside those of known distributions."""

import pytest
import torch

from dosimeter.runs.reproduction.studies.head_distributions import HeadDistributions


def test_normal_features_have_the_moments_of_a_normal_distribution(client_with, rng):
    features, others = 10 + torch.randn(2, 4000, 5, generator=rng)
    found = HeadDistributions()(client_with(features, torch.zeros(4000, dtype=torch.long), torch.zeros(4, 5), auxiliary=others), rng)
    assert found["feature_skew"] < 0.2
    assert found["feature_kurtosis"] == pytest.approx(3, abs=0.3)
    assert found["feature_mean_error"] < 0.01
    assert found["mean_probability"] == pytest.approx(0.25)
    assert found["probability_mean_error"] == pytest.approx(0)


def test_other_images_of_another_mean_are_told(client_with, rng):
    features = 1 + torch.rand(50, 5, generator=rng)
    found = HeadDistributions()(client_with(features, torch.zeros(50, dtype=torch.long), torch.zeros(4, 5), auxiliary=2 * features), rng)
    assert found["feature_mean_error"] == pytest.approx(1)
