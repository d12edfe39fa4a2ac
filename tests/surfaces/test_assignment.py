"""One-to-one matching, against brute force, and what must not disturb it."""

from itertools import permutations

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from dosimeter.surfaces.assignment import assign, distances


@pytest.mark.parametrize("seed", range(5))
def test_is_the_best_of_all_permutations(seed):
    recovered, truth = torch.rand(2, 6, 1, 3, 3, generator=torch.Generator().manual_seed(seed)).double()
    norms = (recovered[:, None] - truth[None]).flatten(2).norm(dim=2)  # (n, B)
    best = min(permutations(range(6)), key=lambda order: float(norms[list(order), range(6)].sum()))
    assert assign(recovered, truth).tolist() == list(best)


@pytest.mark.parametrize(("recovered_count", "true_count"), [(3, 5), (5, 3)])
def test_is_the_best_of_all_choices_where_the_numbers_differ(recovered_count, true_count):
    rng = torch.Generator().manual_seed(31)
    recovered, truth = torch.rand(recovered_count, 4, generator=rng), torch.rand(true_count, 4, generator=rng)
    norms = (recovered[:, None] - truth[None]).norm(dim=2)
    assignment = assign(recovered, truth)
    matched = (assignment >= 0).nonzero().flatten()
    assert len(matched) == 3
    assert len(set(assignment[matched].tolist())) == 3
    if recovered_count < true_count:
        best = min(float(norms[range(3), list(order)].sum()) for order in permutations(range(5), 3))
    else:
        best = min(float(norms[list(order), range(3)].sum()) for order in permutations(range(5), 3))
    assert float(norms[assignment[matched], matched].sum()) == pytest.approx(best)


def test_undoes_a_shuffle_of_a_large_batch():
    rng = torch.Generator().manual_seed(32)
    truth = torch.rand(300, 3, 8, 8, generator=rng)
    order = torch.randperm(300, generator=rng)
    recovered = truth[order] + 0.05 * torch.randn(300, 3, 8, 8, generator=rng)
    assert assign(recovered, truth).tolist() == order.argsort().tolist()


def test_a_saturated_image_cannot_take_an_exact_hits_partner():
    truth = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(35)) * torch.linspace(0.3, 0.9, 8).reshape(8, 1, 1, 1)
    recovered = truth.clone()
    recovered[0] = 1.0  # the darkest image came back white, the rest are exact
    squared_rows, squared_columns = linear_sum_assignment(distances(recovered, truth).square().numpy())
    assert (squared_rows != squared_columns).any()
    assert assign(recovered, truth).tolist() == list(range(8))


def test_what_is_not_finite_is_matched_with_nothing():
    truth = torch.eye(4)
    recovered = truth[[3, 2, 1, 0]].clone()
    recovered[0, 0], recovered[2, 1] = torch.nan, -torch.inf
    assert assign(recovered, truth).tolist() == [3, -1, 1, -1]
    assert assign(torch.full((4, 4), torch.nan), truth).tolist() == [-1] * 4
    assert assign(torch.empty(0, 4), truth).tolist() == [-1] * 4


def test_nearly_parallel_rows_are_told_apart():
    base = 1e3 * torch.ones(40, 64, dtype=torch.float64)
    truth = base + 1e-3 * torch.randn(40, 64, generator=torch.Generator().manual_seed(33), dtype=torch.float64)
    assert assign(truth.flip(0), truth).tolist() == list(range(39, -1, -1))


def test_distances_are_taken_in_pieces_without_a_seam():
    rng = torch.Generator().manual_seed(34)
    rows, columns = torch.rand(3, 5, generator=rng), torch.rand(600, 5, generator=rng)
    expected = (rows[:, None] - columns[None]).abs().sum(2)
    assert torch.allclose(distances(rows, columns, order=1.0), expected.double(), atol=1e-6)
