"""The search for the scalar, against brute force over a dense set of scalars."""

import dataclasses

import numpy as np
import pytest

from dosimeter.engines.scalar.problem import ScalarProblem, on_host, scalar_problem
from dosimeter.engines.scalar.search import grid_search, solve

LABELS = {
    "smoothing": [0.02, 0.02, 0.86, 0.02, 0.02, 0.02, 0.02, 0.02],
    "mixup": [0.0, 0.3, 0.0, 0.0, 0.0, 0.7, 0.0, 0.0],
    "one_hot": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
}


def distance(problem: ScalarProblem, scalar: float) -> float:
    """How far the label at this scalar is from its family, over |s| τ, entry by entry."""
    label = np.sort(problem.labels(np.array([scalar]))[0])
    rest = label[: -problem.free]
    target = rest.mean() if problem.family == "smoothing" else 0.0
    return float(np.linalg.norm(rest - target)) / abs(scalar * problem.temperature)


def brute_force(problem: ScalarProblem) -> float:
    """The scalar of least distance among many, then among many near it, again and again."""
    sizes = np.geomspace(1e-4, 1, 4000) / problem.temperature
    best = _nearest(problem, np.concatenate([sizes, -sizes]))
    for width in (1e-3, 1e-5, 1e-7):
        best = _nearest(problem, best * (1 + width * np.linspace(-5, 5, 201)))
    return best


def _nearest(problem: ScalarProblem, guesses: np.ndarray) -> float:
    return float(guesses[np.argmin([distance(problem, guess) for guess in guesses])])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", list(LABELS))
def test_the_grid_finds_the_scalar_of_a_brute_force_and_the_true_one(sample, family, temperature) -> None:
    one = sample(LABELS[family], seed=3, temperature=temperature, bias=False)
    problem, found = solve(one.head, temperature, family, use_bias=True)
    row = int(np.abs(one.errors).argmax())
    assert found.errors[0] == pytest.approx(one.errors[row], rel=1e-9)
    assert found.errors[0] == pytest.approx(brute_force(problem), rel=1e-6)
    np.testing.assert_allclose(found.labels[0], one.label, atol=1e-9)
    assert found.residuals[0] == pytest.approx(distance(problem, found.errors[0]), abs=1e-9)
    assert not found.read


@pytest.mark.parametrize("seed", range(5))
def test_no_candidate_beats_the_first_and_none_is_worse_than_a_dense_grid(sample, seed) -> None:
    one = sample(LABELS["smoothing"], seed=seed, bias=False)
    problem = scalar_problem(one.head, on_host(one.head.weight_gradient), 1.0, "smoothing", int(np.abs(one.errors).argmax()))
    either = dataclasses.replace(problem, sign=0)  # both signs are searched
    found = grid_search(either)
    assert (found.residuals[0] <= found.residuals).all()
    sizes = np.geomspace(1e-3, 1, 3000)
    assert found.residuals[0] <= min(distance(either, guess) for guess in np.concatenate([sizes, -sizes]))


def test_the_bias_gradient_gives_the_scalar_of_any_label(sample) -> None:
    """The label is of no family, so only the bias can tell it."""
    one = sample([0.4, 0.1, 0.2, 0.05, 0.25])
    problem, found = solve(one.head, 1.0, "smoothing", use_bias=True)
    assert found.read
    assert found.errors[0] == pytest.approx(one.errors[np.abs(one.errors).argmax()], rel=1e-12)
    np.testing.assert_allclose(found.labels[0], one.label, atol=1e-12)
    assert found.residuals[0] == pytest.approx(distance(problem, found.errors[0]), rel=1e-9)
    np.testing.assert_allclose(problem.row / found.errors[0], one.feature, rtol=1e-10)


def test_a_bias_gradient_that_disagrees_with_the_rows_is_not_read(sample) -> None:
    one = sample(LABELS["smoothing"])
    wrong = dataclasses.replace(one.head, bias_gradient=one.head.bias_gradient.roll(1))
    _, found = solve(wrong, 1.0, "smoothing", use_bias=True)
    assert not found.read
    np.testing.assert_allclose(found.labels[0], one.label, atol=1e-8)


@pytest.mark.parametrize("noise", [1e-7, 1e-5])
def test_the_error_bar_covers_what_noise_does_to_the_label(sample, noise) -> None:
    one = sample(LABELS["smoothing"], bias=False)
    rng = np.random.default_rng(1)
    gradient = one.head.weight_gradient
    shaken = gradient + noise * gradient.norm() / gradient.numel() ** 0.5 * gradient.new_tensor(rng.normal(size=gradient.shape))
    _, found = solve(dataclasses.replace(one.head, weight_gradient=shaken), 1.0, "smoothing", use_bias=True)
    assert 0 < np.abs(found.labels[0] - one.label).sum() <= 10 * found.error_bars[0]
    assert found.error_bars[0] < 1e3 * noise
