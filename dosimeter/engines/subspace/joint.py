"""The least-squares fit of a whole batch: its outer products add up to the gradient.

    (1/m) Σ w∘dᵢ xᵢᵀ = U S,   xᵢ = S tᵢ        (C − 1)·B equations for B² unknowns
    (1/m) Σ w∘dᵢ     = w∘∇b                     C − 1 more, where the bias gradient is known

Each sample's own equations (equations.py) are among these. The others tie the samples together, and are far better conditioned if
the features are nearly collinear. From B > (C − 1)/2 a sample's own equations do not suffice, and only the joint fit is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.least_squares import Damping, Parts, Problem, minimise
from dosimeter.engines.subspace.certificate import DEVIATIONS, add_repeatability, forward_variance
from dosimeter.engines.subspace.equations import Equations, probabilities, slopes, weighted_errors, whole_span

DAMPING = Damping(first=1e-4, shrink=0.1, grow=10.0, least=1e-15, ridge=0.0)
REST = 1e-9  # relative length of a step that no longer moves a feature
MOST_RIVALS = 64  # labels that a batch's labels are compared with: the batch's own, and those whose rows have most noise


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """A batch that explains the gradient, and how well."""

    t: Tensor  # (B, B)
    mass: float  # batch size over the gradient's scale
    misfit: float  # residual energy over the energy expected from the noise
    error_bar: Tensor  # (B,)
    isolated: Tensor  # (B,) bool: at rest, and Gauss–Newton leads back from inside the error ellipsoid
    label_margin: Tensor  # (B,) deviations by which each label fits better than any other one


def fit_batch(equations: Equations, t: Tensor, labels: Tensor, mass: float, *, free_scale: bool = False, iterations: int = 60) -> BatchFit:
    """Levenberg–Marquardt on the whole batch from `t`; `mass` is the batch size over the gradient's scale.

    With `free_scale` the scale is one more unknown, as after clipping.
    """
    problem = _WholeBatch(equations=equations, labels=labels, weights=_even_weights(equations), mass=mass, free_scale=free_scale)
    rough = _descend(problem, t, iterations, patience=3)
    problem = replace(problem, weights=_column_weights(equations, rough), mass=rough.mass)  # only a solution tells the columns' noise
    return _summary(problem, _descend(problem, rough.t, iterations, patience=10))


def guess_batch(equations: Equations, start: Tensor, labels: Tensor, mass: float, spread: float, rng: Generator) -> Tensor:
    """Coordinates (B, B) where a joint fit begins, from the labels alone: F = D⁺ᵀ ∇W (rgla Eq. 5) with D at the mean feature.

    Samples of one label come out equal. Random steps of `spread` times the mean feature's length set them apart.
    """
    p = probabilities(equations, whole_span(equations), start[None]).repeat(len(labels), 1)
    errors = weighted_errors(equations, whole_span(equations), p, labels) @ equations.spectrum.left  # (B, B)
    t = mass * torch.linalg.pinv(errors, rtol=1e-8).T
    noise = (
        torch.randn(t.shape, generator=rng, dtype=t.dtype, device=t.device) * equations.spectrum.values
    )  # with the spectrum of a feature
    length = torch.linalg.vector_norm(start * equations.spectrum.values)
    noise = noise * (spread * length / torch.linalg.vector_norm(noise, dim=1, keepdim=True)) / equations.spectrum.values
    twins = (labels[:, None] == labels).sum(1) > 1
    return t + torch.where(twins[:, None], noise, 0.1 * noise)


@dataclass(frozen=True, kw_only=True)
class _State:
    """A batch, and what it leaves of the gradient."""

    t: Tensor  # (B, B)
    p: Tensor  # (B, C)
    error: Tensor  # (B, C) w∘d
    x: Tensor  # (B, B) S t with weighted columns; with a bias, also a column of ones
    residual: Tensor  # (C, B), or (C, B + 1) with a bias
    mass: float

    @property
    def value(self) -> float:
        return float(self.residual.square().sum())


@dataclass(frozen=True, kw_only=True)
class _WholeBatch(Problem):
    """One problem, the residual of the whole gradient; the unknowns are all coordinates and, where the scale is free, the mass."""

    equations: Equations
    labels: Tensor  # (B,)
    weights: Tensor  # (B,) or (B + 1,) of the residual's columns
    mass: float
    free_scale: bool

    def start(self, t: Tensor) -> Tensor:
        """(B, B) -> (1, k)."""
        flat = t.reshape(1, -1)
        return torch.cat([flat, flat.new_full((1, 1), self.mass)], 1) if self.free_scale else flat

    def state(self, unknowns: Tensor, parts: Parts) -> _State:
        t, mass = self._split(unknowns)
        p, error, x, residual = (part[0] for part in parts)
        return _State(t=t, p=p, error=error, x=x, residual=residual, mass=mass)

    def evaluate(self, unknowns: Tensor, rows: Tensor) -> tuple[Tensor, Parts]:
        t, mass = self._split(unknowns)
        state = _evaluate(self.equations, t, self.labels, mass, self.weights)
        return state.residual.square().sum()[None], (state.p[None], state.error[None], state.x[None], state.residual[None])

    def normal_equations(self, unknowns: Tensor, rows: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        normal, gradient = _normal_equations(self.equations, self.state(unknowns, parts), self.weights, self.free_scale)
        return normal[None], gradient[None]

    def move(self, unknowns: Tensor, steps: Tensor) -> Tensor:
        """The step of the mass is one of its logarithm, and at most by a factor of e."""
        moved = unknowns - steps
        if self.free_scale:
            moved[0, -1] = float(unknowns[0, -1]) * math.exp(-max(-1.0, min(1.0, float(steps[0, -1]))))
        return moved

    def at_rest(self, unknowns: Tensor, steps: Tensor, trial: Tensor, better: Tensor) -> Tensor:
        """Whether an accepted step moves no feature by more than REST of its length; a rejected one is damped more."""
        (before, _), (after, _) = self._split(unknowns), self._split(trial)
        moved = _length(self.equations, after - before)
        return better & (moved < REST * _length(self.equations, after)).all()

    def _split(self, unknowns: Tensor) -> tuple[Tensor, float]:
        rank = self.equations.rank
        return unknowns[0, : rank * rank].view(rank, rank), float(unknowns[0, -1]) if self.free_scale else self.mass


def _descend(problem: _WholeBatch, t: Tensor, iterations: int, patience: int) -> _State:
    found = minimise(problem, problem.start(t), DAMPING, iterations=iterations, count_rejected=False, patience=patience)
    return problem.state(found.unknowns, found.parts)


def _evaluate(equations: Equations, t: Tensor, labels: Tensor, mass: float, weights: Tensor) -> _State:
    spectrum = equations.spectrum
    p = probabilities(equations, whole_span(equations), t)
    error = weighted_errors(equations, whole_span(equations), p, labels)
    x, target = t * spectrum.values, spectrum.left * spectrum.values
    if equations.bias_target is not None:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        target = torch.cat([target, equations.bias_target[:, None]], 1)
    x = x * weights
    return _State(t=t, p=p, error=error, x=x, residual=error.T @ x / mass - target * weights, mass=mass)


def _normal_equations(equations: Equations, state: _State, weights: Tensor, free_scale: bool) -> tuple[Tensor, Tensor]:
    """JᵀJ (B², B²) and Jᵀρ (B²,). Block (i, j), with Mᵢ the slopes of sample i and s = S ω:

    (dᵢ·dⱼ) diag(s²) + (s∘xⱼ)(Mⱼᵀ dᵢ)ᵀ + (Mᵢᵀ dⱼ)(s∘xᵢ)ᵀ + (xᵢ·xⱼ) Mᵢᵀ Mⱼ, over mass². The column of ones counts in xᵢ·xⱼ only.
    A free scale adds log mass as the last unknown.
    """
    rank, mass = equations.rank, state.mass
    slope = slopes(equations, whole_span(equations), state.p)  # (B, C, B)
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
    """Ones, and for the bias's column the ratio of the noises: (B,) or (B + 1,)."""
    weights = torch.ones_like(equations.spectrum.values)
    if equations.bias_target is None:
        return weights
    return torch.cat([weights, weights.new_tensor([equations.spectrum.noise / equations.bias_noise])])


def _column_weights(equations: Equations, state: _State) -> Tensor:
    """One over each column's noise, (B,) or (B + 1,): from the gradient, the forward pass and the turned row space."""
    spectrum, t = equations.spectrum, state.t
    lever = (spectrum.weights * state.p).square()  # (B, C)
    turned = spectrum.noise**2 * t.square().sum(1) * (lever * equations.outside).mean(1)
    even = _even_weights(equations)
    x = t * spectrum.values
    if equations.bias_target is not None:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    extra = ((forward_variance(equations, t, state.p).mean(1) + turned)[:, None] * (x * even).square()).sum(0) / state.mass**2
    return even * spectrum.noise / (spectrum.noise**2 + extra).sqrt()


def _summary(problem: _WholeBatch, state: _State) -> BatchFit:
    """The fit at its final state, with error bars from the inverse of the normal matrix."""
    equations, rank, spectrum = problem.equations, problem.equations.rank, problem.equations.spectrum
    columns = rank + (equations.bias_target is not None)
    freedom = columns * (spectrum.informative - 1) - rank * rank - problem.free_scale
    misfit = state.value / (spectrum.noise**2 * max(freedom, 1))
    system = _factor_normal_equations(problem, state)
    if system is None or freedom < 2:
        infinite = torch.full_like(state.t[:, 0], torch.inf)
        no = torch.isfinite(infinite)
        return BatchFit(t=state.t, mass=state.mass, misfit=misfit, error_bar=infinite, isolated=no, label_margin=0 * state.t[:, 0])
    covariance = torch.cholesky_inverse(system.lower).diagonal() * system.scale.square()  # of each unknown, in units of the noise
    noise = spectrum.noise * max(misfit * (1 + 3 * (2 / freedom) ** 0.5), 1.0) ** 0.5
    inside = noise**2 * (covariance[: rank * rank].view(rank, rank) * spectrum.values.square()).sum(1)
    outside = spectrum.noise**2 * state.t.square().sum(1) * equations.weight.shape[1]
    bar = DEVIATIONS * (inside + outside).sqrt() / _length(equations, state.t)
    isolated = _is_isolated(problem, state, system, noise, inside.sqrt())
    margin = _label_margins(problem, state, system) / noise if bool(isolated.any()) else torch.zeros_like(bar)
    bar = add_repeatability(equations, bar)
    return BatchFit(t=state.t, mass=state.mass, misfit=misfit, error_bar=bar, isolated=isolated, label_margin=margin)


def _label_margins(problem: _WholeBatch, state: _State, system: _System) -> Tensor:
    """The root of the least rise of the residual energy if a sample takes another label: (B,).

    The label b in place of a changes the residual by Δ = w∘(y_a − y_b) xᵀ/mass. The unknowns absorb ‖L⁻¹Jᵀ Δ‖² of ‖Δ‖², with JᵀJ = L Lᵀ.
    Exchanged labels need no test: where the unknowns absorb an exchange, the samples exchange their features too.
    """
    equations, rank, mass, x = problem.equations, problem.equations.rank, state.mass, state.x
    names, own = _rival_labels(equations, problem.labels)
    y = torch.eye(equations.classes, dtype=x.dtype, device=x.device)[names] if equations.targets is None else equations.targets[names]
    y = equations.share * equations.spectrum.weights * y  # (m, C)
    along, s = state.error @ y.T, equations.spectrum.values * problem.weights[:rank]  # (B, m)
    slope = torch.einsum("jcr,kc->kjr", slopes(equations, whole_span(equations), state.p), y)  # (m, B, B)
    near, seen = x @ x.T, y @ state.residual @ x.T / mass  # (B, B), (m, B)
    apart = torch.cdist(y, y, compute_mode="donot_use_mm_for_euclid_dist").square() / mass**2  # (m, m)
    margins = torch.empty_like(x[:, 0])
    for sample, label in enumerate(own.tolist()):
        pull = along.T[:, :, None] * (x[sample, :rank] * s) + slope * near[sample][None, :, None]
        pull = pull.reshape(len(names), -1)
        if problem.free_scale:
            pull = torch.cat([pull, -(along.T @ near[sample])[:, None]], 1)
        absorbed = torch.linalg.solve_triangular(system.lower, (pull * system.scale).T / mass**2, upper=False)  # (k, m)
        absorbed = absorbed - absorbed[:, label, None]
        rise = apart[label] * near[sample, sample] - absorbed.square().sum(0) + 2 * (seen[label, sample] - seen[:, sample])
        rise[label] = torch.inf
        margins[sample] = rise.amin()
    return margins.clamp_min(0).sqrt()


def _rival_labels(equations: Equations, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels that may be mistaken for the batch's (m,), the batch's among them, and where these stand among them (B,)."""
    if equations.targets is not None:
        return torch.arange(len(equations.targets), device=labels.device), labels
    chosen = torch.zeros(equations.classes, dtype=torch.bool, device=labels.device)
    chosen[equations.spectrum.weights.argsort()[:MOST_RIVALS]] = True
    chosen[labels] = True
    return chosen.nonzero()[:, 0], chosen.cumsum(0)[labels] - 1


def _is_isolated(problem: _WholeBatch, state: _State, system: _System, noise: float, deviation: Tensor) -> Tensor:
    """Whether each sample is at rest to within its standard `deviation` (B,), and comes back from three of them away: (B,) bool.

    Each of two random displacements of the whole batch is followed by one Gauss–Newton step.
    """
    equations = problem.equations
    isolated = _length(equations, system.newton_step(state.t)) < deviation
    for seed in (0, 1):
        lower = system.lower
        draw = torch.randn(len(lower), 1, dtype=lower.dtype, generator=torch.Generator().manual_seed(seed)).to(lower.device)
        away = 3 * noise * torch.linalg.solve_triangular(lower.T, draw, upper=True)[:, 0] * system.scale
        away = away[: state.t.numel()].view_as(state.t)
        displaced = _evaluate(equations, state.t + away, problem.labels, state.mass, problem.weights)
        there = _factor_normal_equations(problem, displaced)
        if there is None:
            return torch.zeros_like(isolated)
        back = _length(equations, away - there.newton_step(state.t))
        isolated &= back < 0.5 * torch.maximum(_length(equations, away), deviation)
    return isolated


@dataclass(frozen=True, kw_only=True)
class _System:
    """The normal equations at one state, scaled to a diagonal of ones and factored."""

    lower: Tensor  # (k, k) Cholesky factor
    scale: Tensor  # (k,)
    gradient: Tensor  # (k,)

    def newton_step(self, like: Tensor) -> Tensor:
        """The Gauss–Newton step of the coordinates: (B, B)."""
        step = torch.cholesky_solve((self.gradient * self.scale)[:, None], self.lower)[:, 0] * self.scale
        return step[: like.numel()].view_as(like)


def _factor_normal_equations(problem: _WholeBatch, state: _State) -> _System | None:
    """None where the normal matrix is singular."""
    normal, gradient = _normal_equations(problem.equations, state, problem.weights, problem.free_scale)
    scale = normal.diagonal().clamp_min(torch.finfo(normal.dtype).tiny).rsqrt()
    eye = torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    lower, failed = torch.linalg.cholesky_ex(normal * scale[:, None] * scale + 1e-15 * eye)
    return _System(lower=lower, scale=scale, gradient=gradient) if int(failed) == 0 else None


def _length(equations: Equations, t: Tensor) -> Tensor:
    """The lengths of the features at coordinates (n, B): (n,)."""
    return torch.linalg.vector_norm(t * equations.spectrum.values, dim=1)
