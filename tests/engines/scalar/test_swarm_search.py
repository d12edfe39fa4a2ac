"""The published search on one sample's gradient, whose scalar is known."""

import numpy as np
import pytest
import torch

from dosimeter.engines.scalar.problem import on_host, scalar_problem
from dosimeter.engines.scalar.swarm_search import REACH, WIDTHS, PublishedSearch, _fly, _windows, published_search

SMOOTHED = [0.02, 0.02, 0.86, 0.02, 0.02, 0.02, 0.02, 0.02]


@pytest.mark.parametrize("search", ["descent", "swarm"])
def test_the_true_scalar_and_label_are_found(sample, rng, search):
    one = sample(SMOOTHED, seed=3)
    gradient = on_host(one.head.weight_gradient)
    row = int(np.abs(one.errors).argmax())
    problem = scalar_problem(one.head, gradient, 1.0, "smoothing", row)
    largest = int(np.abs(gradient[row]).argmax())
    settings = PublishedSearch(optimiser="swarm" if search == "swarm" else "lbfgs_and_swarm")
    found = published_search(problem, problem.pull, gradient[:, largest] / gradient[row, largest], rng, settings)
    assert found.errors[0] == pytest.approx(one.errors[row], rel=1e-2)
    np.testing.assert_allclose(found.labels[0], one.label, atol=1e-2)
    assert found.residuals[0] < 1e-5
    assert np.isnan(found.floors).all()


def test_the_swarm_finds_a_planted_zero_on_either_side(rng):
    for place in (3.7, -12.5):
        guess, value = _fly(
            lambda x, place=place: (x - place).square(), (5.0, 10.0), rng, torch.zeros((), dtype=torch.float64), PublishedSearch()
        )
        assert float(guess) == pytest.approx(place, abs=1e-4)
        assert value < 1e-8


def test_windows_leave_zero_in_both_directions_and_stay_in_reach():
    assert list(_windows((5, 4))) == [(0.7, 6.0), (-6.3, -1.0), (5.7, 10.0), (-10.3, -6.0)]
    assert list(_windows((100,))) == []
    for widths in WIDTHS.values():
        assert all(high < REACH for _, high in _windows(widths))
