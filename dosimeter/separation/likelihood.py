"""The most likely features behind a distorted gradient, where nothing can be proved any more: guesses, each with its own spread.

The model. A feature is what the network answers most inputs with, times the sample's own gain, plus what all samples of the batch share,
plus its own deviation:

    f_ih = g_i π_h + q_h (δ_h + ε_ih),   δ_h ~ N(0, u),   ε_ih ~ N(0, v)        π and q: typical.py

and the gradient is ∇W = (1/B) Σ dᵢ fᵢᵀ, dᵢ = softmax(W fᵢ + b) − yᵢ, of which some entries are known up to noise and others only to lie
between two bounds (distortion.py). g, u and v are found along with the features, by expectation maximisation; nothing is tuned to a
data set. Given the errors dᵢ, each feature of the batch has a Gaussian posterior of B dimensions; entries of a sample's own row that
were pruned, and features that follow a ReLU, cut its marginals; and the errors follow from the features, so the two alternate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.separation.distortion import Distortion
from dosimeter.separation.typical import Typical

ITERATIONS = 100
SETTLED = 1e-6  # relative change of the features that ends the iteration
EXACT = 1e-4  # noise of an entry that was sent as it is, over the gradient's root mean square: keeps the posterior well conditioned
LARGEST_FIT = 2**26  # features times squared batch size
SPREAD = 0.1  # first guess of u and v
BIAS_UNIT = 1e-5  # noise of a bias entry that was sent as it is, relative
FAR = 30.0  # standard deviations beyond which a Gaussian's tail is not computed


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A head, what was sent of its gradient, and the labels; all in float64."""

    weight: Tensor  # (C, H) over the loss's temperature
    bias: Tensor  # (C,)
    targets: Tensor  # (B, C) what the loss aims at
    labels: Tensor  # (B,)
    temperature: float
    gradient: Tensor  # (C, H)
    distortion: Distortion
    bias_gradient: Tensor | None  # (C,)
    bias_distortion: Distortion | None
    typical: Typical  # π, q
    non_negative: bool
    free_scale: bool  # a defense may have scaled the whole gradient

    @property
    def size(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Likely:
    """The mean of the features' posterior, and its spread."""

    features: Tensor  # (B, H)
    spread: Tensor  # (B,) expected relative feature error
    residual: float  # of the gradient, relative
    seen: Tensor  # (B,) share of the entries of each sample's own row that were sent, up to noise

    @property
    def sentence(self) -> str:
        """What the guesses rest on."""
        sent = float(self.seen.median())
        rest = "" if sent == 1 else f"; {sent:.1%} of a sample's own row was sent as it is, of the rest only bounds are known"
        return f"guesses are the most likely features behind the defenses, expected to be off by {float(self.spread.median()):.2g}{rest}"


@dataclass
class _Belief:
    """What is believed of all features before the gradient is looked at."""

    gain: Tensor  # (B,) g
    shared: Tensor  # (H,) δ
    between: Tensor  # () u
    within: Tensor  # () v


def fits(size: int, features: int) -> bool:
    """Whether a batch is small enough for the posterior of every feature to be held at once."""
    return 0 < size**2 * features <= LARGEST_FIT


def likely_features(problem: Problem) -> Likely:
    """Alternate the features' posterior, the errors that follow from it, and what is believed of all features."""
    noise = max(problem.distortion.noise, EXACT * _size_of_entries(problem))
    features = _first_guess(problem)
    shared = torch.zeros_like(problem.typical.mean)
    belief = _Belief(torch.ones_like(features[:, 0]), shared, *shared.new_full((2,), SPREAD))
    belief.gain = _gains(problem, features, shared)
    best, best_residual, variance = features, math.inf, torch.zeros_like(features)
    step, change = 1.0, math.inf
    for _ in range(ITERATIONS):
        errors = _errors(problem, features)  # (B, C)
        mean, variance = _posterior(problem, errors, belief, noise)
        mean, variance = truncated(mean, variance, *_bounds(problem, errors, features))
        moved = float(torch.linalg.matrix_norm(mean - features) / torch.linalg.matrix_norm(mean))
        step = max(step / 2, 0.05) if moved > change else min(1.5 * step, 1.0)
        features, change = features + step * (mean - features), moved
        _learn(belief, problem, mean, variance)
        residual = _residual(problem, features)
        if residual < best_residual:
            best, best_residual = features, residual
        if moved < SETTLED:
            break
    residual = _residual(problem, features)
    if not residual < 2 * best_residual + 1e-6:  # it left a better explanation behind
        features, residual = best, best_residual
    size = torch.linalg.vector_norm(features, dim=1).clamp_min(torch.finfo(features.dtype).tiny)
    return Likely(
        features=features,
        spread=variance.sum(1).sqrt() / size,
        residual=residual,
        seen=problem.distortion.live[problem.labels].double().mean(1),
    )


def _first_guess(problem: Problem) -> Tensor:
    """Each sample's row over its bias gradient where both stand out of their noise, else the typical feature: (B, H)."""
    start = problem.typical.mean.expand(problem.size, -1)
    if problem.bias_gradient is None or problem.bias_distortion is None:
        return start.clone()
    own = problem.bias_gradient[problem.labels]  # (B,)
    told = problem.bias_distortion.live[problem.labels] & (own < -2 * problem.bias_distortion.noise)
    told &= problem.distortion.live[problem.labels].double().mean(1) > 0.5
    quotient = problem.gradient[problem.labels] / torch.where(told, own, -1.0)[:, None]
    return torch.where(told[:, None], quotient.clamp_min(0) if problem.non_negative else quotient, start)


def _errors(problem: Problem, features: Tensor) -> Tensor:
    """dᵢ/(τB), as far as the bias gradient bears them out: (B, C).

    ∇b sums the errors of all samples. Where the model is sure, 1 − p hangs on the last digits of the logits, and the bias
    gradient knows it better: each row is multiplied by the tᵢ that explain ∇b, held to 1 the tighter the smaller p is.
    """
    p = torch.softmax(features @ problem.weight.T + problem.bias, 1)
    errors = (p - problem.targets) / (problem.temperature * problem.size)
    if problem.bias_gradient is None or problem.bias_distortion is None:
        return errors
    told = problem.bias_distortion.live & (torch.bincount(problem.labels, minlength=p.shape[1]) > 0)
    if not bool(told.any()):
        return errors
    rows, sent = errors[:, told], problem.bias_gradient[told]  # (B, k), (k,)
    if problem.free_scale:
        whole = rows.sum(0)
        scale = (whole @ sent / whole.square().sum()).clamp_min(1e-12)
        errors, rows = errors * scale, rows * scale
    noise = max(problem.bias_distortion.noise, BIAS_UNIT * float(sent.abs().max()))
    loose = p.gather(1, problem.labels[:, None])[:, 0].clamp_min(1e-6)  # (B,)
    normal = rows @ rows.T / noise**2 + torch.diag(loose**-2)
    shares = torch.linalg.solve(normal, rows @ sent / noise**2 + loose**-2)
    return shares.clamp(1e-3, 1e3)[:, None] * errors


def _posterior(problem: Problem, errors: Tensor, belief: _Belief, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of every feature given the live entries of its column: (B, H) each."""
    size, columns = problem.size, problem.gradient.shape[1]
    live, unit = problem.distortion.live.to(errors), problem.typical.size  # (C, H), (H,)
    expected = problem.typical.mean * belief.gain[:, None] + unit * belief.shared  # (B, H)
    precision = 1 / (belief.within * unit.square()).clamp_min(torch.finfo(errors.dtype).tiny)  # (H,)
    pairs = (errors[:, None] * errors).flatten(0, 1)  # (B·B, C)
    normal = (live.T @ pairs.T).view(columns, size, size) / noise**2
    normal.diagonal(dim1=1, dim2=2).add_(precision[:, None])
    right = (errors @ (live * problem.gradient) / noise**2 + expected * precision).T  # (H, B)
    scale = normal.diagonal(dim1=1, dim2=2).rsqrt()  # (H, B)
    eye = torch.eye(size, dtype=errors.dtype, device=errors.device)
    lower = torch.linalg.cholesky(normal * scale[:, :, None] * scale[:, None] + 1e-12 * eye)
    mean = scale * torch.cholesky_solve((right * scale)[:, :, None], lower)[:, :, 0]
    variance = torch.cholesky_inverse(lower).diagonal(dim1=1, dim2=2) * scale.square()
    return mean.T, variance.T


def _bounds(problem: Problem, errors: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """What the bounds on each sample's own row, and a ReLU, say of its features: two (B, H)."""
    low = torch.full_like(features, 0.0 if problem.non_negative else -torch.inf)
    high = torch.full_like(features, torch.inf)
    own = -errors.gather(1, problem.labels[:, None])  # (B, 1), positive
    others = (errors.T @ features)[problem.labels] + own * features  # what all other samples add to the row
    cut = ~problem.distortion.live[problem.labels]
    low = torch.where(cut, torch.maximum(low, (others - problem.distortion.high[problem.labels]) / own), low)
    high = torch.where(cut, (others - problem.distortion.low[problem.labels]) / own, high)
    high = torch.maximum(high, torch.zeros_like(high)) if problem.non_negative else high
    return torch.minimum(low, high), high


def _learn(belief: _Belief, problem: Problem, features: Tensor, variance: Tensor) -> None:
    """The step of maximisation: gains, what is shared, and both spreads."""
    mean, unit = problem.typical.mean, problem.typical.size
    belief.gain = _gains(problem, features, belief.shared)
    deviation = (features - belief.gain[:, None] * mean) / unit  # (B, H)
    trust = problem.size / (problem.size + belief.within / belief.between)
    belief.shared = trust * deviation.mean(0)
    belief.between = (belief.shared.square().mean() + belief.between * (1 - trust)).clamp_min(1e-12)
    belief.within = ((deviation - belief.shared).square() + variance / unit.square()).mean().clamp_min(1e-12)


def _gains(problem: Problem, features: Tensor, shared: Tensor) -> Tensor:
    """How much of the typical feature each sample has, by least squares: (B,)."""
    slope = problem.typical.mean / problem.typical.size  # (H,)
    return ((features / problem.typical.size - shared) @ slope) / slope.square().sum().clamp_min(1e-12)


def _residual(problem: Problem, features: Tensor) -> float:
    """‖∇W − (1/B) Σ dᵢ fᵢᵀ‖ / ‖∇W‖; an entry that is known by its bounds misses by what it is outside of them."""
    distortion = problem.distortion
    explained = _errors(problem, features).T @ features
    allowed = torch.minimum(torch.maximum(explained, distortion.low), distortion.high)
    missing = torch.where(distortion.live, problem.gradient, allowed) - explained
    return float(torch.nan_to_num(torch.linalg.matrix_norm(missing) / torch.linalg.matrix_norm(problem.gradient), nan=torch.inf))


def _size_of_entries(problem: Problem) -> float:
    """The root mean square of what is not zero."""
    return float(problem.gradient[problem.gradient != 0].square().mean().sqrt())


def truncated(mean: Tensor, variance: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of Gaussians cut to [low, high], by the standard formulas, on the side where the tail is the smaller one."""
    deviation = variance.sqrt()
    from_low, from_high = (((bound - mean) / deviation).clamp(-FAR, FAR) for bound in (low, high))
    mirrored = from_low > 0  # differences of the distribution function keep their digits below 0 only
    a, b = torch.where(mirrored, -from_high, from_low), torch.where(mirrored, -from_low, from_high)
    mass = torch.special.ndtr(b) - torch.special.ndtr(a)
    at_a, at_b = _density(a), _density(b)
    usable = mass > 1e-13
    mass = torch.where(usable, mass, 1.0)
    shift = torch.where(usable, (at_a - at_b) / mass, b)  # without any mass left, the bound nearer to the mean
    shift = torch.minimum(torch.maximum(shift, a), b)
    shrunk = torch.where(usable, 1 + (a * at_a - b * at_b) / mass - shift.square(), 0.0).clamp(1e-12, 1)
    return mean + deviation * torch.where(mirrored, -shift, shift), variance * shrunk


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
