"""Label smoothing of unknown strength: one more unknown in a sample's own equations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dosimeter.engines.subspace.equations import Equations, Span, off_space, probabilities, slopes, weighed_errors, whole
from dosimeter.engines.subspace.single import linear_scan

GUESSES = (0.0, 0.1, 0.2, 0.3, 0.5)  # strengths that the scan over classes is made with
CLASSES = 3  # likeliest classes solved for at each guess
ITERATIONS = 30


def with_smoothing(equations: Equations, strength: float) -> Equations:
    """The same head under targets (1 − ε) y + ε/C."""
    return replace(equations, share=1 - strength, even=strength / equations.classes)


def estimate_smoothing(equations: Equations, start: Tensor) -> float:
    """The strength ε at which some sample's equations are solved best; they hold with ε free as they do with ε known.

    The target (1 − ε) e_y + ε/C is linear in ε, so Gauss–Newton takes it as one more coordinate of the sample.
    """
    span = whole(equations)
    best, lowest = 0.0, torch.inf
    for guess in GUESSES:
        smoothed = with_smoothing(equations, guess)
        scan = linear_scan(smoothed, span, start)
        for label in scan.score.argsort()[:CLASSES]:
            strength, value = _solve(equations, span, scan.reached[label], label[None], guess)
            if value < lowest and 0 <= strength < 1:
                best, lowest = strength, value
    return best


def _solve(equations: Equations, span: Span, t: Tensor, label: Tensor, strength: float) -> tuple[float, float]:
    """Damped Gauss–Newton on (t, ε) for one sample: ε and the squared relative residual."""
    value, damping = torch.inf, 1e-3
    for _ in range(ITERATIONS):
        residual, jacobian, size = _linearised(equations, span, t, label, strength)
        value = float(residual.square().sum() / size)
        scale = torch.linalg.vector_norm(jacobian, dim=0).clamp_min(torch.finfo(t.dtype).tiny)
        level = jacobian / scale
        eye = torch.eye(level.shape[1], dtype=t.dtype, device=t.device)
        solved, failed = torch.linalg.solve_ex(level.T @ level + (damping + 1e-14) * eye, level.T @ residual)
        step = torch.where(failed > 0, torch.nan, solved) / scale  # a singular one is damped more, as one that leads uphill
        trial, wanted = t - step[:-1], strength - float(step[-1])
        after, _, after_size = _linearised(equations, span, trial, label, wanted)
        if float(after.square().sum() / after_size) < value:
            t, strength, damping = trial, wanted, damping * 0.05
        else:
            damping *= 8
        if damping > 1e4:
            break
    return strength, value


def _linearised(equations: Equations, span: Span, t: Tensor, label: Tensor, strength: float) -> tuple[Tensor, Tensor, Tensor]:
    """Residual (C,), Jacobian (C, B + 1) and squared size of the error at (t, ε)."""
    smoothed = with_smoothing(equations, strength)
    p = probabilities(equations, span, t[None])
    error = weighed_errors(smoothed, span, p, label)
    even, sharp = (weighed_errors(with_smoothing(equations, end), span, p, label) for end in (1.0, 0.0))
    by_strength = even - sharp
    rows = torch.cat([slopes(equations, span, p)[0].T, by_strength])  # (B + 1, C)
    return off_space(span, error)[0], off_space(span, rows).T, error.square().sum()
