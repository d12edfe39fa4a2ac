"""The search: every planted sample once, with its label, from the gradient alone."""

import torch

from dosimeter.engines.subspace.equations import mean_coordinates, row_coordinates
from dosimeter.engines.subspace.search import Candidates, _select_distinct, candidates_at, missing_counts, search


def searched(planted, rng, wanted=None, **options):
    equations = planted.equations
    start = mean_coordinates(equations, planted.gradient, planted.bias_gradient)
    rows = row_coordinates(equations, planted.gradient, planted.bias_gradient, start)
    return search(equations, start, rows, wanted, rng, attempts=4, starts=8, **options)


def test_every_sample_is_found_once_with_its_label(plant, distance_to, rng):
    planted = plant()
    found = searched(planted, rng)
    assert len(found) == 6
    assert float(distance_to(found.t @ planted.equations.basis, planted.features).max()) < 1e-6
    nearest = torch.cdist(found.t @ planted.equations.basis, planted.features).argmin(1)
    assert sorted(nearest.tolist()) == list(range(6))
    assert torch.equal(found.labels, planted.labels[nearest])


def test_samples_of_one_label_come_apart(plant, distance_to, rng):
    planted = plant(4, labels=torch.full((4,), 7))
    found = searched(planted, rng)
    assert found.labels.tolist() == [7] * 4
    assert float(distance_to(found.t @ planted.equations.basis, planted.features).max()) < 1e-6


def test_an_absent_label_is_not_found_even_where_it_is_wanted(plant, rng):
    planted = plant()
    absent = next(label for label in range(30) if label not in planted.labels.tolist())
    wanted = torch.zeros(30, dtype=torch.long)
    wanted[absent] = 1
    found = searched(planted, rng, wanted)
    assert absent not in found.labels.tolist()


def test_what_is_found_already_is_kept_and_not_found_again(plant, rng):
    planted = plant()
    known = candidates_at(planted.equations, planted.t[:2], planted.labels[:2], torch.zeros(2, dtype=torch.float64))
    found = searched(planted, rng, found=known)
    assert torch.equal(found.t[:2], planted.t[:2])
    assert len(found) == 6
    nearest = torch.cdist(found.t @ planted.equations.basis, planted.features).argmin(1)
    assert sorted(nearest.tolist()) == list(range(6))


def test_two_solutions_of_one_sample_count_once(plant):
    planted = plant()
    twice = torch.cat([planted.t, 1.000001 * planted.t[:3]])
    labels = torch.cat([planted.labels, planted.labels[:3]])
    new = candidates_at(planted.equations, twice, labels, torch.zeros(9, dtype=torch.float64))
    empty = Candidates(t=planted.t[:0], labels=planted.labels[:0], errors=planted.t[:0], value=planted.t[:0, 0])
    assert torch.equal(_select_distinct(planted.equations, new, empty, None).t, planted.t)


def test_missing_counts_are_what_is_wanted_and_not_found():
    wanted = torch.tensor([2, 0, 1, 3])
    assert missing_counts(wanted, torch.tensor([0, 1, 1, 3, 3])).tolist() == [1, 0, 1, 1]
