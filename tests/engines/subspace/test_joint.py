"""The joint fit: its normal equations are autograd's, it ends at the planted batch, and its bars hold."""

from dataclasses import replace

import pytest
import torch

from dosimeter.engines.subspace import joint
from dosimeter.engines.subspace.certificate import DEVIATIONS
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


@pytest.mark.parametrize("free_scale", [False, True])
def test_label_margins_are_the_rise_of_the_residual_off_the_jacobian(plant, free_scale):
    """Every other label of every sample, by a numerical Jacobian and an orthogonal projection."""
    planted = plant(size=4, classes=12, features=20, noise=1e-6)
    equations, labels = planted.equations, planted.labels
    fit = fit_batch(equations, planted.t, labels, 4.0, free_scale=free_scale)
    problem = joint._WholeBatch(
        equations=equations, labels=labels, weights=joint._even_weights(equations), mass=fit.mass, free_scale=free_scale
    )
    state = _evaluate(equations, fit.t, labels, fit.mass, problem.weights)
    problem = replace(problem, weights=joint._column_weights(equations, state))
    state = _evaluate(equations, fit.t, labels, fit.mass, problem.weights)
    system = joint._factor_normal_equations(problem, state)
    assert system is not None
    margins = joint._label_margins(problem, state, system)
    size = torch.linalg.vector_norm(fit.t)

    def residual(step, names):
        mass = fit.mass * float(torch.exp(step[16])) if free_scale else fit.mass
        return _evaluate(equations, fit.t + size * step[:16].view(4, 4), names, mass, problem.weights).residual.reshape(-1)

    steps = 1e-7 * torch.eye(16 + free_scale, dtype=torch.float64)
    jacobian = torch.stack([residual(step, labels) - residual(-step, labels) for step in steps], 1)
    off = torch.linalg.qr(jacobian / jacobian.norm(dim=0), mode="complete").Q[:, len(steps) :]

    def rise(names):
        still = torch.zeros(16 + free_scale, dtype=torch.float64)
        return float((off.T @ residual(still, names)).square().sum() - (off.T @ residual(still, labels)).square().sum())

    for sample in range(4):
        rivals = [labels.index_fill(0, torch.tensor([sample]), other) for other in range(12) if other != int(labels[sample])]
        assert float(margins[sample]) == pytest.approx(min(rise(names) for names in rivals) ** 0.5, rel=1e-3)
    assert float(fit.label_margin.min()) > DEVIATIONS


def test_where_there_are_many_classes_only_the_noisiest_rows_and_the_batch_are_compared(plant):
    planted = plant(size=3, classes=100)
    names, places = joint._rival_labels(planted.equations, planted.labels)
    assert joint.MOST_RIVALS <= len(names) <= joint.MOST_RIVALS + 3
    assert torch.equal(names[places], planted.labels)
