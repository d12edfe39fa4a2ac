"""CV matching: the exact integer solver against brute force and against the published evolution."""

import itertools
from dataclasses import replace

import pytest
import torch

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import least_counts
from dosimeter.labels.cv_matching import _coarse, best_cosine_counts, cosine, evolved_counts
from dosimeter.network.head import Head
from dosimeter.runs.server import recover_labels
from dosimeter.types import Refused


@pytest.mark.parametrize("seed", range(30))
def test_the_exact_solver_equals_brute_force(seed):
    rng = torch.Generator().manual_seed(seed)
    classes = int(torch.randint(1, 5, (), generator=rng))
    total = classes + int(torch.randint(0, 8, (), generator=rng))
    pull = torch.rand(classes, generator=rng, dtype=torch.float64) + 0.01
    every = torch.tensor([v for v in itertools.product(range(1, total + 1), repeat=classes) if sum(v) == total])
    found = best_cosine_counts(pull, total, torch.ones_like(pull))
    assert found.sum() == total
    assert int(found.min()) >= 1
    assert float(cosine(found, pull)) == pytest.approx(float(cosine(every, pull).max()), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_solver_is_never_worse_than_the_evolution(seed):
    rng = torch.Generator().manual_seed(seed)
    pull = torch.rand(25, generator=rng, dtype=torch.float64) + 0.05
    least = torch.randint(1, 3, (25,), generator=rng).double()
    evolved = evolved_counts(pull, 64, least, 20, 200, rng)
    assert evolved.sum() == 64
    assert bool((evolved >= least).all())
    assert float(cosine(best_cosine_counts(pull, 64, least), pull)) >= float(cosine(evolved, pull)) - 1e-12


@pytest.mark.parametrize("solver", ["exact", "evolution"])
def test_counts_come_back_from_an_untrained_net(expose, solver):
    estimate = recover_labels(expose([1, 1, 1, 4, 4, 7], classes=40, auxiliary_per_class=1), "cv_matching", solver=solver)
    assert estimate.labels.tolist() == [1, 1, 1, 4, 4, 7]
    assert 0.9 < float(estimate.details["cosine"]) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_signs_prove_counts_that_the_cosine_misses(expose, seed):
    labels = torch.randint(60, (48,), generator=torch.Generator().manual_seed(seed)).sort().values
    exposure = expose(labels, classes=100, auxiliary_per_class=1, seed=seed)
    estimate = recover_labels(exposure, "cv_matching")
    assert estimate.labels.tolist() == labels.tolist()
    assert estimate.certified
    assert not recover_labels(exposure, "cv_matching", bounded=False).certified


def test_counts_are_not_certified_where_probabilities_hide_some(expose):
    crowded = recover_labels(expose([1] * 30 + [2] * 20, classes=5, auxiliary_per_class=1), "cv_matching")
    assert crowded.counts.sum() == 50
    assert not crowded.certified


def test_least_counts_are_the_counts_less_the_probability_mass_rounded_up():
    rng = torch.Generator().manual_seed(0)
    probabilities = torch.rand(12, 6, generator=rng, dtype=torch.float64).softmax(1)
    labels = torch.tensor([0] * 5 + [3] * 7)
    errors = (probabilities - torch.nn.functional.one_hot(labels, 6)) / 12
    expected = (torch.bincount(labels, minlength=6) - probabilities.sum(0)).ceil().clamp_min(0)
    head = Head(name="", weight=torch.ones(6, 4), bias=torch.ones(6), weight_gradient=None, bias_gradient=errors.sum(0), non_negative=True)
    assert least_counts(head, 12, CrossEntropy()).tolist() == expected.tolist()
    assert not least_counts(head, 12, CrossEntropy(smoothing=0.1)).any()
    assert not least_counts(replace(head, bias_gradient=20 * head.bias_gradient), 12, CrossEntropy()).any()
    features = torch.rand(12, 4, generator=rng, dtype=torch.float64)
    by_rows = replace(head, bias_gradient=None, weight_gradient=errors.T @ features)
    assert least_counts(by_rows, 12, CrossEntropy()).tolist() == [1, 0, 0, 1, 0, 0]
    assert not least_counts(replace(by_rows, non_negative=False), 12, CrossEntropy()).any()


def test_a_missing_batch_size_is_refused(expose):
    with pytest.raises(Refused, match="cv_matching needs the batch size"):
        recover_labels(expose([1, 2], declare=False, auxiliary_per_class=1), "cv_matching")


def test_the_rows_are_in_class_order_whatever_their_means():
    means = torch.tensor([0.1, -0.2, -0.5, 0.3, -0.1])
    coarse, failed = _coarse(means, torch.tensor([0, 0, 0, 1, 0]), 6)
    assert coarse.tolist() == [1, 2, 3, 4]
    assert not failed
