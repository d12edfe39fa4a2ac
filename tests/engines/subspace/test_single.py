"""One sample at a time: the scan, the solve and the polish against planted samples, autograd and brute force."""

from dataclasses import replace

import pytest
import torch

from dosimeter.engines.subspace import single
from dosimeter.engines.subspace.equations import probabilities, project_off, slopes, weighted_errors, whole_span
from dosimeter.engines.subspace.single import (
    _LinearStep,
    _RelativeResidual,
    likeliest_pairs,
    linear_scan,
    newton_step,
    polish,
    sensitivities,
    solve,
)


def test_the_scan_ranks_present_classes_first_and_the_solve_ends_at_the_truth(plant, distance_to):
    planted = plant()
    equations, span = planted.equations, whole_span(planted.equations)
    scan = linear_scan(equations, span, planted.t.mean(0))
    present = planted.labels.unique()
    assert set(scan.score.argsort()[: len(present)].tolist()) == set(present.tolist())
    solved, value = solve(equations, span, scan.reached[present], present)
    solved, _ = polish(equations, span, solved, present)
    assert float(distance_to(solved @ equations.basis, planted.features).max()) < 1e-9
    assert float(value.max()) < 1e-20


@pytest.mark.parametrize("blends", [False, True])
def test_the_gradient_alone_is_that_of_the_normal_equations(plant, blends):
    planted = plant(4, 20, 30)
    equations = replace(planted.equations, blends=blends)
    labels = torch.tensor([3 * 20 + 5, 7 * 20 + 7]) if blends else torch.tensor([3, 7])
    problem, rows, points = (
        _RelativeResidual(equations=equations, span=whole_span(equations), labels=labels),
        torch.arange(2),
        planted.t[:2] + 0.1,
    )
    _, parts = problem.evaluate(points, rows)
    torch.testing.assert_close(
        problem.gradient(points, rows, parts), problem.normal_equations(points, rows, parts)[1], rtol=1e-9, atol=1e-12
    )


def test_a_large_problem_keeps_its_matrices_and_ends_at_the_same_solutions(plant, monkeypatch):
    planted = plant()
    equations, span, present = planted.equations, whole_span(planted.equations), planted.labels.unique()
    reached = linear_scan(equations, span, planted.t.mean(0)).reached[present]
    expected, _ = solve(equations, span, reached, present)
    built = []
    normal = single._normal_equations
    monkeypatch.setattr(single, "CHORD_WORK", 0)
    monkeypatch.setattr(single, "_normal_equations", lambda *arguments: built.append(len(arguments[2])) or normal(*arguments))
    found, value = solve(equations, span, reached, present)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert float(value.max()) < 1e-18  # chords end linearly; `polish` gains the last digits
    assert sum(built) <= 3 * len(present)


def test_one_scan_is_a_gauss_newton_step_for_every_class(plant):
    """Brute force: the least-squares solution of the projected linear equations, class by class."""
    planted = plant(4, 20, 30)
    equations, span, start = planted.equations, whole_span(planted.equations), planted.t.mean(0)
    scan = linear_scan(equations, span, start)
    projector = torch.eye(20, dtype=torch.float64) - span.left @ span.left.T
    for label in range(20):

        def error(t, label=label):
            return weighted_errors(equations, span, probabilities(equations, span, t[None]), torch.tensor([label]))[0]

        slope = projector @ torch.autograd.functional.jacobian(error, start)
        right = projector @ error(start)
        step = torch.linalg.lstsq(slope, right[:, None]).solution[:, 0]
        torch.testing.assert_close(scan.reached[label], start - step, rtol=1e-6, atol=1e-8)
        left = torch.linalg.vector_norm(right - slope @ step) / torch.linalg.vector_norm(error(start))
        assert float(scan.score[label]) == pytest.approx(float(left), rel=1e-6, abs=1e-12)


def test_the_scan_of_all_classes_agrees_with_the_errors_of_each(plant):
    """Also where a sum of squares cancels: at a sample its own class is fitted exactly, and at a far point p is the label."""
    planted = plant(4, 40, 30)
    equations, span = planted.equations, whole_span(planted.equations)
    for start in (planted.t.mean(0), planted.t[0], 30 * planted.t[1]):
        p = probabilities(equations, span, start[None])
        orthogonal = torch.linalg.qr(slopes(equations, span, p)[0] - span.left @ (span.left.T @ slopes(equations, span, p)[0])).Q
        step = _LinearStep(equations=equations, span=span, p=p, orthogonal=orthogonal)
        (along, score), (expected, expected_score) = step.of_classes(), step.of(torch.arange(40))
        torch.testing.assert_close(along, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(score, expected_score, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("blends", [False, True])
def test_the_normal_equations_are_those_of_the_relative_residual(plant, blends):
    planted = plant(4, 20, 30)
    equations = replace(planted.equations, blends=blends)
    labels = planted.labels * 20 + (planted.labels + 3) % 20 if blends else planted.labels
    problem, rows, away = (
        _RelativeResidual(equations=equations, span=whole_span(equations), labels=labels),
        torch.arange(4),
        1.1 * planted.t,
    )
    value, parts = problem.evaluate(away, rows)
    normal, gradient = problem.normal_equations(away, rows, parts)
    for row in range(4):

        def residual(t, row=row):
            return problem.evaluate(t[None], torch.tensor([row]))[1][1][0]

        slope, here = torch.autograd.functional.jacobian(residual, away[row]), residual(away[row])
        torch.testing.assert_close(gradient[row], slope.T @ here, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(normal[row], slope.T @ slope, rtol=1e-6, atol=1e-9)
        assert float(value[row]) == pytest.approx(float(here.square().sum()))


def test_the_relative_residual_stays_where_the_plain_one_vanishes(plant):
    """Far out, the softmax reaches the label and the error vanishes: a zero of the plain residual that is no sample."""
    planted = plant(3, 20, 30)
    equations, span, far = planted.equations, whole_span(planted.equations), 30 * planted.t
    p = probabilities(equations, span, far)
    reached = p.argmax(1)
    plain = project_off(span, weighted_errors(equations, span, p, reached)).square().sum(1)
    value, _ = _RelativeResidual(equations=equations, span=span, labels=reached).evaluate(far, torch.arange(3))
    assert float(plain.max()) < 1e-3 * float(equations.spectrum.weights.max()) ** 2
    assert float(value.min()) > 1e-2


def test_newton_steps_converge_quadratically(plant):
    planted = plant(4, 20, 30)
    equations, span = planted.equations, whole_span(planted.equations)
    t, distances = 1.01 * planted.t, []
    for _ in range(4):
        distances.append(float(torch.linalg.matrix_norm((t - planted.t) * equations.spectrum.values)))
        t = newton_step(equations, span, t, planted.labels)
    assert distances[1] < 0.1 * distances[0]
    assert distances[3] < 1e-3 * distances[2] or distances[3] < 1e-9


def test_sensitivities_say_how_far_a_disturbed_equation_moves_the_feature(plant):
    """Reference: the explicit pseudo-inverse of the projected slopes."""
    planted = plant(3, 20, 30)
    equations, span = planted.equations, whole_span(planted.equations)
    t, inverse = polish(equations, span, planted.t, planted.labels)
    moved = sensitivities(equations, t, planted.labels, inverse)
    projector = torch.eye(20, dtype=torch.float64) - span.left @ span.left.T
    for row, label in enumerate(planted.labels):

        def error(t, label=label):
            return weighted_errors(equations, span, probabilities(equations, span, t[None]), label[None])[0]

        slope = projector @ torch.autograd.functional.jacobian(error, t[row])
        explicit = equations.spectrum.values[:, None] * torch.linalg.pinv(slope)  # (B, C)
        torch.testing.assert_close(moved[row], explicit.square().sum(0), rtol=1e-5, atol=1e-12)


def test_the_scan_over_pairs_is_a_scan_over_every_share():
    """Brute force: the best of a grid of shares, for each pair."""
    rng = torch.Generator().manual_seed(0)
    rest, errors = (torch.randn(12, 12, generator=rng, dtype=torch.float64) for _ in range(2))
    pairs, share, score = likeliest_pairs(rest, errors)
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]
    for pair, mine, value in zip(pairs.tolist(), share, score):
        first, second = divmod(pair, 12)
        if not torch.isfinite(value):
            continue
        blended = torch.linalg.vector_norm((1 - grid) * rest[first] + grid * rest[second], dim=1)
        assert float(blended.min()) == pytest.approx(
            float(torch.linalg.vector_norm((1 - mine) * rest[first] + mine * rest[second])), rel=1e-5
        )
        size = torch.linalg.vector_norm((1 - mine) * errors[first] + mine * errors[second])
        assert float(value) == pytest.approx(float(blended.min() / size), rel=1e-5)
