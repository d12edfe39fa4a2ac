"""All samples at once: the batch whose outer products add up to the gradient, in least squares.

    (1/m) Σ w∘dᵢ xᵢᵀ = U S,   xᵢ = S tᵢ        (C − 1)·B equations for B² unknowns
    (1/m) Σ w∘dᵢ     = w∘∇b                     C − 1 more, where the bias gradient is known

Each sample's own equations (equations.py) are part of these; the rest tie the samples together and are far better conditioned when
features are nearly collinear. Needed where a sample's own equations do not suffice, that is from B > (C − 1)/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.subspace.certificate import DEVIATIONS, forward_variance, with_floor
from dosimeter.engines.subspace.equations import Equations, probabilities, slopes, weighed_errors, whole


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A batch that explains the gradient, and how well."""

    t: Tensor  # (B, B)
    mass: float  # batch size over the gradient's scale
    misfit: float  # residual energy over what the noise explains
    error_bar: Tensor  # (B,)
    isolated: Tensor  # (B,) bool: at rest, and the error ellipsoid holds no bend


def fit(equations: Equations, t: Tensor, labels: Tensor, mass: float, *, free_scale: bool = False, iterations: int = 60) -> Fit:
    """Levenberg–Marquardt on the whole batch from `t`; `mass` is the batch size over the gradient's scale.

    With `free_scale` that scale is one more unknown, as after clipping.
    """
    state = _descend(equations, t, labels, mass, _even_weights(equations), free_scale, iterations, patience=3)
    weights = _column_weights(equations, state)  # only a solution tells the columns' noise
    state = _descend(equations, state.t, labels, state.mass, weights, free_scale, iterations)
    return _summary(equations, state, labels, weights, free_scale)


def guess(equations: Equations, start: Tensor, labels: Tensor, mass: float, spread: float, rng: Generator) -> Tensor:
    """Coordinates to begin a joint fit at, from the labels alone: F = D⁺ᵀ ∇W (rgla Eq. 5) with D at the mean feature: (B, B).

    Samples of one label come out equal, at their mean, and are set apart at random by `spread` times the mean feature.
    """
    p = probabilities(equations, whole(equations), start[None]).repeat(len(labels), 1)
    errors = weighed_errors(equations, whole(equations), p, labels) @ equations.spectrum.left  # (B, B)
    t = mass * torch.linalg.pinv(errors, rtol=1e-8).T
    noise = torch.randn(t.shape, generator=rng, dtype=t.dtype, device=t.device) * equations.spectrum.values  # a feature-like spectrum
    length = torch.linalg.vector_norm(start * equations.spectrum.values)
    noise = noise * (spread * length / torch.linalg.vector_norm(noise, dim=1, keepdim=True)) / equations.spectrum.values
    twins = (labels[:, None] == labels).sum(1) > 1
    return t + torch.where(twins[:, None], noise, 0.1 * noise)


def _descend(
    equations: Equations,
    t: Tensor,
    labels: Tensor,
    mass: float,
    weights: Tensor,
    free_scale: bool,
    iterations: int,
    patience: int = 10,
) -> _State:
    """Levenberg–Marquardt until nothing moves, or until `patience` steps in a row gain less than a percent."""
    state = _evaluate(equations, t, labels, mass, weights)
    damping, idle = 1e-4, 0
    eye = torch.eye(t.numel() + free_scale, dtype=t.dtype, device=t.device)
    for _ in range(iterations):
        normal, gradient = _normal_equations(equations, state, weights, free_scale)
        scale = normal.diagonal().clamp_min(torch.finfo(t.dtype).tiny).rsqrt()
        normal = normal * scale[:, None] * scale
        trial = None
        while damping < 1e4:
            lower, failed = torch.linalg.cholesky_ex(normal + damping * eye)
            if int(failed) == 0:
                step, growth = _step(lower, scale, gradient, t)
                tried = _evaluate(equations, state.t - step, labels, state.mass * math.exp(-max(-1.0, min(1.0, growth))), weights)
                if tried.value < state.value:
                    trial, damping = tried, max(damping * 0.1, 1e-15)
                    break
            damping = max(damping * 10, 1e-14)
        if trial is None:
            break
        moved = _length(equations, trial.t - state.t)
        idle = idle + 1 if trial.value > 0.99 * state.value else 0
        state = trial
        if idle >= patience or bool((moved < 1e-9 * _length(equations, state.t)).all()):
            break
    return state


@dataclass(frozen=True, kw_only=True)
class _State:
    t: Tensor  # (B, B)
    p: Tensor  # (B, C)
    error: Tensor  # (B, C) w∘d
    x: Tensor  # (B, B) S t, columns weighed; with a bias, a column of ones besides
    residual: Tensor  # (C, B), or (C, B + 1) with a bias
    mass: float
    value: float


def _evaluate(equations: Equations, t: Tensor, labels: Tensor, mass: float, weights: Tensor) -> _State:
    spectrum = equations.spectrum
    p = probabilities(equations, whole(equations), t)
    error = weighed_errors(equations, whole(equations), p, labels)
    x, target = t * spectrum.values, spectrum.left * spectrum.values
    if equations.bias_target is not None:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        target = torch.cat([target, equations.bias_target[:, None]], 1)
    x = x * weights
    residual = error.T @ x / mass - target * weights
    return _State(t=t, p=p, error=error, x=x, residual=residual, mass=mass, value=float(residual.square().sum()))


def _normal_equations(equations: Equations, state: _State, weights: Tensor, free_scale: bool) -> tuple[Tensor, Tensor]:
    """JᵀJ (B², B²) and Jᵀρ (B²,). Block (i, j), with Mᵢ the slopes of sample i and s = S ω:

    (dᵢ·dⱼ) diag(s²) + (s∘xⱼ)(Mⱼᵀ dᵢ)ᵀ + (Mᵢᵀ dⱼ)(s∘xᵢ)ᵀ + (xᵢ·xⱼ) Mᵢᵀ Mⱼ, over mass². The column of ones counts in xᵢ·xⱼ only.
    A free scale adds log mass as the last unknown.
    """
    rank, mass = equations.rank, state.mass
    slope = slopes(equations, whole(equations), state.p)  # (B, C, B)
    s = equations.spectrum.values * weights[:rank]
    flat = slope.permute(1, 0, 2).reshape(equations.classes, rank * rank)  # (C, (i, r))
    normal = (flat.T @ flat).view(rank, rank, rank, rank)  # i, r, j, q
    normal *= (state.x @ state.x.T)[:, None, :, None]
    towards = torch.einsum("icr,jc->ijr", slope, state.error)  # Mᵢᵀ dⱼ
    scaled = state.x[:, :rank] * s  # s∘x
    normal += torch.einsum("jr,jiq->irjq", scaled, towards)
    normal += torch.einsum("ijr,iq->irjq", towards, scaled)
    normal.diagonal(dim1=1, dim2=3).add_((state.error @ state.error.T)[:, :, None] * s.square())
    normal = normal.view(rank * rank, rank * rank) / mass**2

    def against(matrix: Tensor) -> Tensor:
        """Jᵀ matrix, for a matrix of the residual's shape."""
        return ((state.error @ matrix[:, :rank]) * s + torch.einsum("icr,ic->ir", slope, state.x @ matrix.T)).reshape(-1) / mass

    gradient = against(state.residual)
    if not free_scale:
        return normal, gradient
    growth = -state.error.T @ state.x / mass  # the derivative of the residual in log mass
    border = against(growth)
    normal = torch.cat([torch.cat([normal, border[:, None]], 1), torch.cat([border, growth.square().sum()[None]])[None]])
    return normal, torch.cat([gradient, (growth * state.residual).sum()[None]])


def _even_weights(equations: Equations) -> Tensor:
    """All columns alike, the bias by its own noise: (B,) or (B + 1,)."""
    weights = torch.ones_like(equations.spectrum.values)
    if equations.bias_target is None:
        return weights
    return torch.cat([weights, weights.new_tensor([equations.spectrum.noise / equations.bias_noise])])


def _column_weights(equations: Equations, state: _State) -> Tensor:
    """One over each column's noise: the gradient's own, and what the forward pass and the turned row space add: (B,) or (B + 1,)."""
    spectrum, t = equations.spectrum, state.t
    lever = (spectrum.weights * state.p).square()  # (B, C)
    turned = spectrum.noise**2 * t.square().sum(1) * (lever * equations.outside).mean(1)
    even = _even_weights(equations)
    x = t * spectrum.values
    if equations.bias_target is not None:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    extra = ((forward_variance(equations, t, state.p).mean(1) + turned)[:, None] * (x * even).square()).sum(0) / state.mass**2
    return even * spectrum.noise / (spectrum.noise**2 + extra).sqrt()


def _summary(equations: Equations, state: _State, labels: Tensor, weights: Tensor, free_scale: bool) -> Fit:
    rank, spectrum = equations.rank, equations.spectrum
    columns = rank + (equations.bias_target is not None)
    freedom = columns * (spectrum.informative - 1) - rank * rank - free_scale
    misfit = state.value / (spectrum.noise**2 * max(freedom, 1))
    factorised = _factorised(equations, state, weights, free_scale)
    if factorised is None or freedom < 2:
        infinite = torch.full_like(state.t[:, 0], torch.inf)
        return Fit(t=state.t, mass=state.mass, misfit=misfit, error_bar=infinite, isolated=torch.isfinite(infinite))
    lower, scale, gradient = factorised
    covariance = torch.cholesky_inverse(lower).diagonal() * scale.square()  # of each unknown, in units of the noise
    noise = spectrum.noise * max(misfit * (1 + 3 * (2 / freedom) ** 0.5), 1.0) ** 0.5
    inside = noise**2 * (covariance[: rank * rank].view(rank, rank) * spectrum.values.square()).sum(1)
    outside = spectrum.noise**2 * state.t.square().sum(1) * equations.weight.shape[1]
    rest, _ = _step(lower, scale, gradient, state.t)
    isolated = _length(equations, rest) < inside.sqrt()  # at rest, to within the noise
    for seed in (0, 1):  # and a Gauss–Newton step leads back from three standard deviations away
        draw = torch.randn(len(lower), 1, dtype=lower.dtype, generator=torch.Generator().manual_seed(seed)).to(lower.device)
        away = 3 * noise * torch.linalg.solve_triangular(lower.T, draw, upper=True)[:, 0] * scale
        away = away[: rank * rank].view(rank, rank)
        again = _factorised(equations, _evaluate(equations, state.t + away, labels, state.mass, weights), weights, free_scale)
        if again is None:
            isolated = torch.zeros_like(isolated)
            break
        back = _length(equations, away - _step(*again, state.t)[0])
        isolated &= back < 0.5 * torch.maximum(_length(equations, away), inside.sqrt())
    bar = DEVIATIONS * (inside + outside).sqrt() / _length(equations, state.t)
    return Fit(t=state.t, mass=state.mass, misfit=misfit, error_bar=with_floor(equations, bar), isolated=isolated)


def _factorised(equations: Equations, state: _State, weights: Tensor, free_scale: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Cholesky factor of the equilibrated normal matrix, the scale, and the gradient; None where it is singular."""
    normal, gradient = _normal_equations(equations, state, weights, free_scale)
    scale = normal.diagonal().clamp_min(torch.finfo(normal.dtype).tiny).rsqrt()
    eye = torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    lower, failed = torch.linalg.cholesky_ex(normal * scale[:, None] * scale + 1e-15 * eye)
    return (lower, scale, gradient) if int(failed) == 0 else None


def _step(lower: Tensor, scale: Tensor, gradient: Tensor, like: Tensor) -> tuple[Tensor, float]:
    """The Gauss–Newton step of the coordinates, and that of log mass."""
    step = torch.cholesky_solve((gradient * scale)[:, None], lower)[:, 0] * scale
    return step[: like.numel()].view_as(like), float(step[-1]) if len(step) > like.numel() else 0.0


def _length(equations: Equations, t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t * equations.spectrum.values, dim=1)
