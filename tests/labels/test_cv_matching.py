"""CV matching: the exact integer solver against brute force and against the published evolution."""

import itertools

import pytest
import torch

from dosimeter.labels.cv_matching import best_cosine_counts, cosine, evolved_counts
from dosimeter.server import recover_labels
from dosimeter.types import Refused


@pytest.mark.parametrize("seed", range(30))
def test_the_exact_solver_equals_brute_force(seed):
    rng = torch.Generator().manual_seed(seed)
    classes = int(torch.randint(1, 5, (), generator=rng))
    total = classes + int(torch.randint(0, 8, (), generator=rng))
    pull = torch.rand(classes, generator=rng, dtype=torch.float64) + 0.01
    every = torch.tensor([v for v in itertools.product(range(1, total + 1), repeat=classes) if sum(v) == total])
    found = best_cosine_counts(pull, total)
    assert found.sum() == total
    assert int(found.min()) >= 1
    assert float(cosine(found, pull)) == pytest.approx(float(cosine(every, pull).max()), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_solver_is_never_worse_than_the_evolution(seed):
    rng = torch.Generator().manual_seed(seed)
    pull = torch.rand(25, generator=rng, dtype=torch.float64) + 0.05
    evolved = evolved_counts(pull, 64, 20, 200, rng)
    assert evolved.sum() == 64
    assert int(evolved.min()) >= 1
    assert float(cosine(best_cosine_counts(pull, 64), pull)) >= float(cosine(evolved, pull)) - 1e-12


@pytest.mark.parametrize("solver", ["exact", "evolution"])
def test_counts_come_back_from_an_untrained_net(expose, solver):
    estimate = recover_labels(expose([1, 1, 1, 4, 4, 7], classes=40, auxiliary_per_class=1), "cv_matching", solver=solver)
    assert estimate.labels.tolist() == [1, 1, 1, 4, 4, 7]
    assert 0.9 < float(estimate.details["cosine"]) <= 1 + 1e-9


def test_a_missing_batch_size_is_refused(expose):
    with pytest.raises(Refused, match="cv_matching needs the batch size"):
        recover_labels(expose([1, 2], declare=False, auxiliary_per_class=1), "cv_matching")
