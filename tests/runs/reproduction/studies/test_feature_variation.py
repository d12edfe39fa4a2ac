"""The variation of sorted features, beside one counted by hand."""

import pytest
import torch

from dosimeter.runs.reproduction.studies.feature_variation import FeatureVariation


def test_the_least_varying_place_is_found_after_sorting(client_with, rng):
    features = torch.tensor([[3.0, 1.0, 9.0], [5.0, 5.0, 1.0], [7.0, 5.0, 3.0]])  # sorted: 1 3 9, 1 5 5, 3 5 7
    found = FeatureVariation(ends=0.0)(client_with(features, torch.zeros(3, dtype=torch.long), torch.eye(3)), rng)
    places = [(5 / 3, torch.tensor([1.0, 1, 3]).std()), (13 / 3, torch.tensor([3.0, 5, 5]).std()), (7, torch.tensor([9.0, 5, 7]).std())]
    variation = [float(deviation) / mean for mean, deviation in places]
    assert found["least_variation"] == pytest.approx(variation[1])
    assert found["least_at"] == 0.5
    assert found["fall"] == pytest.approx(variation[0] / variation[1])
    assert found["rise"] == pytest.approx(variation[2] / variation[1])


def test_places_that_are_always_zero_are_left_out(client_with, rng):
    features = torch.tensor([[-1.0, 2.0, 4.0], [-2.0, 3.0, 5.0]])
    found = FeatureVariation()(client_with(features, torch.zeros(2, dtype=torch.long), torch.eye(3)), rng)
    assert found["least_at"] == 1
