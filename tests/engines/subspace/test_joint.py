"""The joint fit: its normal equations are autograd's, it ends at the planted batch, and its bars hold."""

import pytest
import torch

from dosimeter.engines.subspace.equations import probabilities, weighted_errors, whole_span
from dosimeter.engines.subspace.joint import _evaluate, _normal_equations, fit_batch, guess_batch


@pytest.mark.parametrize("bias_known", [False, True])
@pytest.mark.parametrize("free_scale", [False, True])
def test_the_normal_matrix_is_that_of_the_jacobian(plant, free_scale, bias_known):
    planted = plant(bias_known=bias_known)
    equations, labels, away = planted.equations, planted.labels, 1.1 * planted.t
    weights = torch.linspace(0.5, 1, 6 + bias_known, dtype=torch.float64)
    normal, gradient = _normal_equations(equations, _evaluate(equations, away, labels, 6.5, weights), weights, free_scale)

    def residual(unknowns):
        mass = 6.5 * torch.exp(unknowns[36]) if free_scale else 6.5
        t = unknowns[:36].view(6, 6)
        error = weighted_errors(equations, whole_span(equations), probabilities(equations, whole_span(equations), t), labels)
        x, target = t * equations.spectrum.values, equations.spectrum.left * equations.spectrum.values
        if bias_known:
            x, target = torch.cat([x, torch.ones_like(x[:, :1])], 1), torch.cat([target, equations.bias_target[:, None]], 1)
        return ((error.T @ x / mass - target) * weights).reshape(-1)

    unknowns = torch.cat([away.reshape(-1), torch.zeros(1, dtype=torch.float64)])[: 36 + free_scale]
    jacobian = torch.autograd.functional.jacobian(residual, unknowns)
    torch.testing.assert_close(normal, jacobian.T @ jacobian)
    torch.testing.assert_close(gradient, jacobian.T @ residual(unknowns))


def test_the_fit_comes_back_from_nearby_and_finds_a_free_scale(plant):
    planted = plant()
    found = fit_batch(planted.equations, 1.02 * planted.t, planted.labels, 6.0)
    torch.testing.assert_close(found.t @ planted.equations.basis, planted.features, rtol=1e-6, atol=1e-8)
    assert bool(found.isolated.all())
    assert found.misfit < 2
    freed = fit_batch(planted.equations, 1.02 * planted.t, planted.labels, 6.3, free_scale=True)
    assert freed.mass == pytest.approx(6.0, rel=1e-6)


def test_a_clipped_gradient_has_the_mass_of_its_scale(plant):
    planted = plant(scale=0.25)
    found = fit_batch(planted.equations, 1.02 * planted.t, planted.labels, 20.0, free_scale=True)
    assert found.mass == pytest.approx(6 / 0.25, rel=1e-6)
    torch.testing.assert_close(found.t @ planted.equations.basis, planted.features, rtol=1e-6, atol=1e-8)


def test_samples_that_are_not_determined_alone_are_determined_together(plant):
    """B > (C − 1)/2: a sample's own equations do not suffice."""
    planted = plant(6, 10, 50, bias_known=True)
    found = fit_batch(planted.equations, 1.01 * planted.t, planted.labels, 6.0)
    torch.testing.assert_close(found.t @ planted.equations.basis, planted.features, rtol=1e-5, atol=1e-7)


def test_error_bars_hold_under_noise(plant):
    for seed in range(5):
        planted = plant(noise=1e-7, seed=seed)
        found = fit_batch(planted.equations, planted.t, planted.labels, 6.0)
        off = torch.linalg.vector_norm(found.t @ planted.equations.basis - planted.features, dim=1)
        relative = off / torch.linalg.vector_norm(planted.features, dim=1)
        assert bool((relative < found.error_bar).all())
        assert bool((found.error_bar < 1e3 * relative).all())


def test_wrong_labels_leave_a_misfit(plant):
    planted = plant()
    found = fit_batch(planted.equations, planted.t, (planted.labels + 1) % 30, 6.0)
    assert found.misfit > 1e6


def test_the_guess_solves_the_gradient_with_the_errors_at_the_mean_feature(plant, rng):
    """F = D⁺ᵀ ∇W: without any spread, the guess reproduces the gradient exactly with those errors."""
    planted = plant(labels=torch.tensor([1, 4, 7, 10, 13, 16]))
    equations, start = planted.equations, planted.t.mean(0)
    t = guess_batch(equations, start, planted.labels, 6.0, 0.0, rng)
    p = probabilities(equations, whole_span(equations), start[None]).repeat(6, 1)
    errors = weighted_errors(equations, whole_span(equations), p, planted.labels) @ equations.spectrum.left
    torch.testing.assert_close(errors.T @ t / 6, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-6)
