"""The separation: planted batches come back certified and whole, alone or jointly, and impossible ones are not claimed."""

from dataclasses import replace

import pytest
import torch

import dosimeter.engines.subspace.separate as module
from dosimeter.engines.subspace.equations import build_equations, mean_coordinates
from dosimeter.engines.subspace.separate import Effort, expected_counts, is_saturated, separate, spare_equations
from dosimeter.engines.subspace.spectrum import factor
from dosimeter.engines.subspace.verdict import BatchFacts


def separated(planted, rng, facts=None, **options):
    facts = BatchFacts(batch_size=planted.size) if facts is None else facts
    return separate(planted.equations, planted.gradient, planted.bias_gradient, facts, rng, effort=Effort(), **options)


@pytest.mark.parametrize(("size", "classes"), [(1, 10), (6, 30), (8, 40)])
def test_a_batch_is_found_whole_with_its_labels(plant, distance_to, rng, size, classes):
    planted = plant(size, classes)
    found = separated(planted, rng)
    assert found.complete
    assert float(distance_to(found.features, planted.features).max()) < 1e-7
    assert found.labels.sort().values.tolist() == planted.labels.sort().values.tolist()


def test_a_sample_that_occurs_twice_is_found_once_with_its_count(plant, rng):
    planted = plant(5, 30)
    features, labels = planted.features[[0, 0, 1, 2, 3]], planted.labels[[0, 0, 1, 2, 3]]
    equations = planted.equations
    error = torch.softmax(features @ equations.weight.T + equations.bias, 1) - torch.nn.functional.one_hot(labels, 30)
    gradient, bias_gradient = error.T @ features / 5, error.mean(0)
    equations = build_equations(factor(gradient, 1e-16, rng, at_most=5), equations.weight, equations.bias, model_unit=2e-16)
    found = separate(equations, gradient, bias_gradient, BatchFacts(batch_size=5), rng, effort=Effort())
    assert found.complete
    assert sorted(found.times.tolist()) == [1, 1, 1, 2]
    twice = found.features[found.times == 2][0]
    torch.testing.assert_close(twice, features[0], rtol=1e-6, atol=1e-8)


def test_more_samples_than_half_the_classes_are_found_jointly(plant, distance_to, rng):
    planted = plant(5, 10, 50, bias_known=True, labels=torch.tensor([0, 1, 2, 4, 6]))
    assert spare_equations(planted.equations) == -1
    found = separated(planted, rng, counts=torch.bincount(planted.labels, minlength=10))
    assert found.complete
    assert float(distance_to(found.features, planted.features).max()) < 1e-4


def test_an_unknown_scale_does_not_matter(plant, distance_to, rng):
    planted = plant(scale=0.01)
    found = separated(planted, rng, BatchFacts(batch_size=6, free_scale=True))
    assert found.complete
    assert float(distance_to(found.features, planted.features).max()) < 1e-6


def test_wrong_counts_are_found_out(plant, rng):
    planted = plant()
    wrong = torch.bincount((planted.labels + 1) % 30, minlength=30)
    found = separated(planted, rng, counts=wrong)
    assert found.complete
    assert found.labels.sort().values.tolist() == planted.labels.sort().values.tolist()


def test_a_gradient_of_full_rank_holds_any_batch(plant, rng):
    planted = plant(12, 10, 50)
    assert planted.equations.rank == 9
    assert is_saturated(planted.equations, 12)
    assert len(separated(planted, rng).features) == 0
    exactly = plant(9, 10, 50, bias_known=True).equations
    assert not is_saturated(exactly, 9)
    assert is_saturated(exactly, None)


def test_negative_features_are_not_certified_behind_a_relu(plant, rng):
    planted = plant()
    weight = planted.equations.weight
    shifted = planted.features - 1.0
    error = torch.softmax(shifted @ weight.T + planted.equations.bias, 1) - torch.nn.functional.one_hot(planted.labels, 30)
    gradient = error.T @ shifted / 6
    equations = build_equations(factor(gradient, 1e-16, rng, at_most=6), weight, planted.equations.bias, model_unit=2e-16)
    either, rectified = (
        separate(equations, gradient, error.mean(0), BatchFacts(batch_size=6, non_negative=sign), rng, effort=Effort())
        for sign in (False, True)
    )
    assert either.complete
    assert not bool(rectified.certified.any())


def test_expected_counts_are_the_counts_of_a_head_that_is_not_confident(plant):
    planted = plant(6, 30, labels=torch.tensor([3, 3, 3, 8, 8, 20]), bias_known=True)
    equations = replace(planted.equations, weight=0.01 * planted.equations.weight, logits=0.01 * planted.equations.logits)
    error = torch.softmax(planted.features @ equations.weight.T + equations.bias, 1) - torch.nn.functional.one_hot(planted.labels, 30)
    start = mean_coordinates(equations, error.T @ planted.features / 6, error.mean(0))
    counts = expected_counts(equations, start, error.mean(0))
    assert counts is not None
    assert torch.equal(counts, torch.bincount(planted.labels, minlength=30))


def test_a_longer_search_goes_on_from_a_shorter_one(plant, rng, monkeypatch):
    """What a quick pass found is neither searched nor assessed again, and the result is that of a whole pass."""
    planted = plant(8, 22, 50, noise=1e-6, seed=1)
    facts = BatchFacts(batch_size=8)
    assessed = []
    assess = module.assess
    monkeypatch.setattr(module, "assess", lambda equations, t, *rest: assessed.append(len(t)) or assess(equations, t, *rest))
    quick = separate(planted.equations, planted.gradient, None, facts, rng, effort=Effort(quick=True))
    assert 0 < int(quick.certified.sum()) < 8
    assert quick.solutions is not None
    known = len(quick.solutions.found)
    longer = separated(planted, rng, begun=quick)
    assert assessed[0] == known
    assert len(assessed) == 2
    assert assessed[1] <= 8 - known
    again = separated(planted, torch.Generator().manual_seed(0))
    assert longer.complete
    order, other = longer.labels.argsort(), again.labels.argsort()
    torch.testing.assert_close(longer.features[order], again.features[other], rtol=1e-3, atol=1e-5)
    assert torch.equal(longer.labels[order], again.labels[other])
