"""The equations hold at the truth, their derivatives are right, and peeling leaves the others."""

import math
from dataclasses import replace

import pytest
import torch

from dosimeter.engines.subspace.equations import (
    blend_shares,
    build_equations,
    peel,
    probabilities,
    project_off,
    slopes,
    weighted_errors,
    whole_span,
)
from dosimeter.engines.subspace.joint import _evaluate, _normal_equations, fit_batch
from dosimeter.engines.subspace.separate import Effort, separate
from dosimeter.engines.subspace.single import likeliest_pairs, linear_scan, polish, solve
from dosimeter.engines.subspace.spectrum import factor
from dosimeter.engines.subspace.verdict import BatchFacts


def head(size: int, classes: int, features: int, seed: int = 0):
    """weight, bias, features, labels, gradient in float64."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weight, bias = draw(classes, features) / math.sqrt(3 * features), draw(classes) / math.sqrt(features)
    f = torch.relu(draw(features) + draw(size, features))
    labels = torch.randint(0, classes, (size,), generator=rng)
    error = torch.softmax(f @ weight.T + bias, 1) - torch.nn.functional.one_hot(labels, classes)
    return weight, bias, f, labels, error.T @ f / size, error.mean(0)


@pytest.fixture
def problem(rng):
    weight, bias, f, labels, gradient, bias_gradient = head(6, 30, 50)
    spectrum = factor(gradient, 1e-16, rng)
    equations = build_equations(spectrum, weight, bias, model_unit=2e-16)
    t = (f @ spectrum.right.T) / spectrum.values
    return equations, t, labels, f, gradient, bias_gradient


def test_the_equations_hold_at_the_truth(problem):
    equations, t, labels, f, _, _ = problem
    error = weighted_errors(equations, whole_span(equations), probabilities(equations, whole_span(equations), t), labels)
    assert float(project_off(whole_span(equations), error).abs().max() / error.abs().max()) < 1e-12
    torch.testing.assert_close(t @ equations.basis, f)
    e = error @ equations.spectrum.left
    torch.testing.assert_close(t @ e.T, 6 * torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-8)  # tᵢ·eⱼ = B δᵢⱼ


def test_slopes_are_the_derivative(problem):
    equations, t, labels, *_ = problem
    span = whole_span(equations)

    def error(t):
        return weighted_errors(equations, span, probabilities(equations, span, t), labels)

    derivative = torch.autograd.functional.jacobian(lambda row: error(row.expand(6, -1))[0], t[0])
    torch.testing.assert_close(slopes(equations, span, probabilities(equations, span, t))[0], derivative)


def test_what_is_left_after_peeling_holds_the_others(problem):
    equations, t, labels, *_ = problem
    error = weighted_errors(equations, whole_span(equations), probabilities(equations, whole_span(equations), t), labels)
    span = peel(equations, t[:4], error[:4] @ equations.spectrum.left)
    assert span.logits.shape[1] == 2
    torch.testing.assert_close(t[4:] @ span.lift @ span.lift.T, t[4:])
    assert float(project_off(span, error[4:]).abs().max() / error.abs().max()) < 1e-10
    assert float(project_off(span, error[:4]).abs().max() / error.abs().max()) > 1e-2


def test_the_scan_ranks_present_classes_first_and_the_solve_ends_at_the_truth(problem):
    equations, t, labels, f, *_ = problem
    span = whole_span(equations)
    scan = linear_scan(equations, span, t.mean(0))
    present = labels.unique()
    assert set(scan.score.argsort()[: len(present)].tolist()) == set(present.tolist())
    solved, value = solve(equations, span, scan.reached[present], present)
    solved, _ = polish(equations, span, solved, present)
    distance = torch.cdist(solved @ equations.basis, f, compute_mode="donot_use_mm_for_euclid_dist")
    assert float(distance.min(1).values.max()) < 1e-8
    assert float(value.max()) < 1e-20


@pytest.mark.parametrize("free_scale", [False, True])
def test_the_joint_normal_matrix_is_that_of_the_jacobian(problem, free_scale):
    equations, t, labels, *_ = problem
    weights = torch.linspace(0.5, 1, 6, dtype=torch.float64)
    away = t * 1.1
    state = _evaluate(equations, away, labels, 6.5, weights)
    normal, gradient = _normal_equations(equations, state, weights, free_scale)

    def residual(unknowns):
        mass = 6.5 * torch.exp(unknowns[36]) if free_scale else 6.5
        p = probabilities(equations, whole_span(equations), unknowns[:36].view(6, 6))
        error = weighted_errors(equations, whole_span(equations), p, labels)
        x = unknowns[:36].view(6, 6) * equations.spectrum.values * weights
        return (error.T @ x / mass - equations.spectrum.left * (equations.spectrum.values * weights)).reshape(-1)

    unknowns = torch.cat([away.reshape(-1), torch.zeros(1, dtype=torch.float64)])[: 36 + free_scale]
    jacobian = torch.autograd.functional.jacobian(residual, unknowns)
    torch.testing.assert_close(normal, jacobian.T @ jacobian)
    torch.testing.assert_close(gradient, jacobian.T @ residual(unknowns))


def test_the_joint_fit_comes_back_from_nearby_and_finds_a_free_scale(problem):
    equations, t, labels, *_ = problem
    found = fit_batch(equations, t * 1.02, labels, 6.0)
    torch.testing.assert_close(found.t @ equations.basis, t @ equations.basis, rtol=1e-6, atol=1e-8)
    freed = fit_batch(equations, t * 1.02, labels, 6.3, free_scale=True)
    assert freed.mass == pytest.approx(6.0, rel=1e-6)


def test_error_bars_are_eight_standard_deviations(rng):
    """Repeated noise on one gradient: the errors scatter as the bars say."""
    weight, bias, f, _, gradient, bias_gradient = head(4, 40, 60, seed=3)
    ratios = []
    for _ in range(20):
        noisy = gradient + 1e-7 * torch.randn(gradient.shape, generator=rng, dtype=torch.float64)
        equations = build_equations(factor(noisy, 1e-16, rng, at_most=4), weight, bias, model_unit=2e-16)
        found = separate(equations, noisy, bias_gradient, BatchFacts(batch_size=4), rng, effort=Effort())
        assert bool(found.certified.all())
        error = torch.cdist(found.features, f).min(1).values / torch.linalg.vector_norm(found.features, dim=1)
        ratios.append(error / found.error_bar)
    ratios = torch.cat(ratios)
    assert float(ratios.max()) < 1
    assert 0.04 < float(ratios.square().mean().sqrt()) < 0.25  # one eighth, were the noise model perfect


def test_blends_follow_the_coordinates(problem):
    """The share of a blend is where the rest fits best, so the slopes are the derivative of the errors with that share moving along."""
    equations, t, labels, *_ = problem
    equations = replace(equations, blends=True)
    span, pairs = whole_span(equations), labels * equations.classes + (labels + 7) % equations.classes

    def errors(t):
        return weighted_errors(equations, span, probabilities(equations, span, t), pairs)

    derivative = torch.autograd.functional.jacobian(lambda row: errors(row.expand(6, -1))[0], 1.1 * t[0])
    torch.testing.assert_close(slopes(equations, span, probabilities(equations, span, 1.1 * t), pairs)[0], derivative)
    shares = blend_shares(equations, span, probabilities(equations, span, t), pairs)
    torch.testing.assert_close(shares, torch.zeros_like(shares), rtol=0, atol=1e-8)  # at the truth, where labels are not mixed


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
