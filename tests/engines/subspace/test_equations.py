"""The equations hold at the truth, their derivatives are right, and peeling leaves the others."""

from dataclasses import replace

import pytest
import torch

from dosimeter.engines.subspace.equations import (
    blend_shares,
    peel,
    probabilities,
    project_off,
    slopes,
    weighted_errors,
    whole_span,
)


@pytest.fixture
def problem(plant):
    planted = plant()
    return planted.equations, planted.t, planted.labels, planted.features


def test_the_equations_hold_at_the_truth(problem):
    equations, t, labels, f = problem
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
