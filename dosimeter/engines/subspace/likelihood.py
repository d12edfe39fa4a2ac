"""The most likely features behind a distorted gradient, each with its spread. They are guesses: nothing is proved.

A feature is the prior mean times the sample's gain, plus the batch's deviation and the sample's own:

    f_ih = g_i π_h + q_h (δ_h + ε_ih),   δ_h ~ N(0, u),   ε_ih ~ N(0, v)        π and q: feature_prior.py

Behind a ReLU this holds for the value before it. Of ∇W = (1/B) Σ dᵢ fᵢᵀ some entries are known up to noise, others by bounds
(distortion.py). Expectation maximisation finds g, u, v and the features. Given the errors dᵢ, each feature column has a Gaussian
posterior, whose marginals the bounds cut. The errors follow from the features, so the two alternate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.subspace.cut_gaussians import rectified_moments, truncated_moments
from dosimeter.engines.subspace.feature_prior import FeaturePrior
from dosimeter.types import Distortion

ITERATIONS = 100
SETTLED_CHANGE = 1e-6  # relative change of the features that ends the iteration
EXACT_ENTRY_NOISE = 1e-4  # assumed noise of an exact entry over the gradient's root mean square; keeps the posterior well conditioned
FIRST_NOISE = 0.3  # least noise that the first iteration assumes, over the gradient's root mean square; halved each iteration
PRIOR_SPREAD_WEIGHT = 0.1  # of the prior spread against the one found, since coarse bounds do not tell spread from mean
LARGEST_POSTERIOR = 2**26  # features times squared batch size
EXACT_BIAS_NOISE = 1e-5  # assumed relative noise of an undistorted bias entry
LEAST_LOGIT_DEVIATION = 0.05  # the posterior variance of a logit shrinks before the alternation is at rest
UNEXPLAINED_SHARE = 0.05  # share of the gradient that may stay unexplained beyond the noise, for the spreads to be believed


@dataclass(frozen=True, kw_only=True)
class LikelihoodProblem:
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
    prior: FeaturePrior  # π, q
    non_negative: bool
    free_scale: bool  # a defense may have scaled the whole gradient

    @property
    def size(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class LikelyFeatures:
    """The mean of the features' posterior, its spread, and how much of the gradient it explains."""

    features: Tensor  # (B, H)
    spread: Tensor  # (B,) expected relative feature error, infinite where the model does not explain the gradient
    residual: float  # of the gradient, relative
    row_coverage: Tensor  # (B,) share of the entries in the row of each sample's label that are known up to noise
    explained: bool  # whether the features account for the gradient, up to its noise
    from_prior: Tensor  # (B,) bool: the feature is the prior mean, because the posterior is implausible

    @property
    def sentence(self) -> str:
        """What the guesses rest on, for the record."""
        sent = float(self.row_coverage.median())
        rest = "" if sent == 1 else f"; {sent:.1%} of a sample's own row was sent as it is, of the rest only bounds are known"
        off = math.inf if bool(self.from_prior.all()) else float(self.spread[~self.from_prior].median())
        known = f"expected to be off by {off:.2g}" if math.isfinite(off) else "by how much they are off is not known"
        left = "" if self.explained else f", but leave {self.residual:.0%} of the gradient unexplained: labels may be others than assumed"
        usual = (
            f"; what the model mostly answers stands for {int(self.from_prior.sum())} of {len(self.from_prior)}"
            if self.from_prior.any()
            else ""
        )
        return f"guesses are the most likely features behind the defenses{left}, {known}{rest}{usual}"


@dataclass
class _Belief:
    """The parameters of the model that all features share, besides the prior."""

    gain: Tensor  # (B,) g
    shared: Tensor  # (H,) δ
    between: Tensor  # () u
    within: Tensor  # () v


def is_small_enough(size: int, features: int) -> bool:
    """Whether a batch is small enough for the posterior of every feature to be held at once."""
    return 0 < size**2 * features <= LARGEST_POSTERIOR


def find_likely_features(problem: LikelihoodProblem) -> LikelyFeatures:
    """Alternate the features' posterior, the errors that follow from it, and what is believed of all features."""
    entry = _root_mean_square(problem)
    noise = max(problem.distortion.noise, EXACT_ENTRY_NOISE * entry)
    features = _first_guess(problem)
    belief = _first_belief(problem)
    best, best_residual, variance = features, math.inf, problem.prior.size.square().expand_as(features)
    step, change = 1.0, math.inf
    for iteration in range(ITERATIONS):
        heat = FIRST_NOISE * entry * 0.5**iteration  # early errors are wrong, so the gradient must not be fitted exactly
        errors = _errors(problem, features, variance)  # (B, C)
        expected, prior = _prior_moments(problem, belief)
        mean, variance = _posterior(problem, errors, expected, prior, max(noise, heat))
        bounds = _bounds(problem, errors, features)
        if problem.non_negative:
            mean, variance, latent, doubt = rectified_moments(*_remove_prior(mean, variance, expected, prior), expected, prior, *bounds)
        else:
            mean, variance = latent, doubt = truncated_moments(mean, variance, *bounds)
        moved = float(torch.linalg.matrix_norm(mean - features) / torch.linalg.matrix_norm(mean))
        step = max(step / 2, 0.05) if moved > change else min(1.5 * step, 1.0)
        features, change = features + step * (mean - features), moved
        _update_belief(belief, problem, latent, doubt)
        residual = _residual(problem, features, variance)
        if residual < best_residual:
            best, best_residual = features, residual
        if moved < SETTLED_CHANGE and heat <= noise:
            break
    residual = _residual(problem, features, variance)
    if not residual < 2 * best_residual + 1e-6:  # an earlier iteration explained the gradient better
        features, residual = best, best_residual
    features, from_prior = _replace_implausible(problem, features)
    size = torch.linalg.vector_norm(features, dim=1).clamp_min(torch.finfo(features.dtype).tiny)
    spread = variance.sum(1).sqrt() / size
    explained = _is_explained(problem, residual, noise)
    return LikelyFeatures(
        features=features,
        spread=torch.where(from_prior, math.inf, spread) if explained else torch.full_like(spread, math.inf),
        residual=residual,
        row_coverage=problem.distortion.live[problem.labels].double().mean(1),
        explained=explained,
        from_prior=from_prior,
    )


def _first_belief(problem: LikelihoodProblem) -> _Belief:
    """The prior's gain and spread; a tenth of that spread is shared by the batch."""
    prior = problem.prior
    return _Belief(prior.gain.expand(problem.size), torch.zeros_like(prior.mean), prior.spread / 10, prior.spread)


def _replace_implausible(problem: LikelihoodProblem, features: Tensor) -> tuple[Tensor, Tensor]:
    """The features (B, H), with the prior mean in place of implausible ones, and which these are (B,).

    A sample that leaves next to nothing in the gradient is explained by a zero feature as well as by a confident one.
    """
    share = problem.prior.share(features)
    odd = (share < problem.prior.least) | (share > problem.prior.most)
    return torch.where(odd[:, None], problem.prior.mean, features), odd


def _first_guess(problem: LikelihoodProblem) -> Tensor:
    """The quotient of each label's row and bias gradient if both exceed their noise, else the prior mean: (B, H)."""
    start = problem.prior.mean.expand(problem.size, -1)
    if problem.bias_gradient is None or problem.bias_distortion is None:
        return start.clone()
    own = problem.bias_gradient[problem.labels]  # (B,)
    usable = problem.bias_distortion.live[problem.labels] & (own < -2 * problem.bias_distortion.noise)
    usable &= problem.distortion.live[problem.labels].double().mean(1) > 0.5
    quotient = problem.gradient[problem.labels] / torch.where(usable, own, -1.0)[:, None]
    return torch.where(usable[:, None], quotient.clamp_min(0) if problem.non_negative else quotient, start)


def _errors(problem: LikelihoodProblem, features: Tensor, variance: Tensor) -> Tensor:
    """dᵢ/(τB), corrected by the bias gradient: (B, C).

    ∇b is the sum of all samples' errors. If the model is confident, 1 − p depends on the last digits of the logits, and ∇b determines it
    better. Each row is therefore multiplied by the tᵢ that explain ∇b. Since d log(1 − p) = −p dz, tᵢ stays the closer to 1 the smaller p
    is and the better the logits are known.
    """
    p = torch.softmax(features @ problem.weight.T + problem.bias, 1)
    errors = (p - problem.targets) / (problem.temperature * problem.size)
    if problem.bias_gradient is None or problem.bias_distortion is None:
        return errors
    usable = problem.bias_distortion.live & (torch.bincount(problem.labels, minlength=p.shape[1]) > 0)
    if not bool(usable.any()):
        return errors
    rows, sent = errors[:, usable], problem.bias_gradient[usable]  # (B, k), (k,)
    if problem.free_scale:
        whole = rows.sum(0)
        scale = (whole @ sent / whole.square().sum()).clamp_min(1e-12)
        errors, rows = errors * scale, rows * scale
    noise = max(problem.bias_distortion.noise, EXACT_BIAS_NOISE * float(sent.abs().max()))
    doubt = (problem.weight[problem.labels].square() * variance).sum(1).sqrt().clamp(LEAST_LOGIT_DEVIATION, 1.0)  # (B,) of the own logit
    loose = (p.gather(1, problem.labels[:, None])[:, 0] * doubt).clamp_min(1e-6)
    normal = rows @ rows.T / noise**2 + torch.diag(loose**-2)
    shares = torch.linalg.solve(normal, rows @ sent / noise**2 + loose**-2)
    return shares.clamp(1e-3, 1e3)[:, None] * errors


def _prior_moments(problem: LikelihoodProblem, belief: _Belief) -> tuple[Tensor, Tensor]:
    """Mean (B, H) and variance (H,) of the features under the current belief, without the gradient."""
    unit = problem.prior.size
    return problem.prior.mean * belief.gain[:, None] + unit * belief.shared, belief.within * unit.square()


def _posterior(problem: LikelihoodProblem, errors: Tensor, expected: Tensor, prior: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of every feature given the live entries of its column: (B, H) each."""
    size, columns = problem.size, problem.gradient.shape[1]
    live, precision = problem.distortion.live.to(errors), 1 / prior  # (C, H), (H,)
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


def _bounds(problem: LikelihoodProblem, errors: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on the features from the bounds on each label's row: (B, H) each."""
    own = -errors.gather(1, problem.labels[:, None])  # (B, 1), positive
    others = (errors.T @ features)[problem.labels] + own * features  # what all other samples add to the row
    cut = ~problem.distortion.live[problem.labels]
    low = torch.where(cut, (others - problem.distortion.high[problem.labels]) / own, -torch.inf)
    high = torch.where(cut, (others - problem.distortion.low[problem.labels]) / own, torch.inf)
    high = high.clamp_min(0) if problem.non_negative else high
    return torch.minimum(low, high), high


def _remove_prior(mean: Tensor, variance: Tensor, expected: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """The likelihood alone, from a Gaussian posterior and its prior: mean and variance (B, H)."""
    precision = (1 / variance - 1 / prior).clamp_min(1e-12 / prior)
    return (mean / variance - expected / prior) / precision, 1 / precision


def _update_belief(belief: _Belief, problem: LikelihoodProblem, features: Tensor, variance: Tensor) -> None:
    """The maximisation step: gains, shared deviation, and both variances."""
    mean, unit = problem.prior.mean, problem.prior.size
    belief.gain = _gains(problem, features, belief.shared)
    deviation = (features - belief.gain[:, None] * mean) / unit  # (B, H)
    trust = problem.size / (problem.size + belief.within / belief.between)
    belief.shared = trust * deviation.mean(0)
    belief.between = (belief.shared.square().mean() + belief.between * (1 - trust)).clamp_min(1e-12)
    found = ((deviation - belief.shared).square() + variance / unit.square()).mean()
    belief.within = (found + PRIOR_SPREAD_WEIGHT * problem.prior.spread) / (1 + PRIOR_SPREAD_WEIGHT)


def _gains(problem: LikelihoodProblem, features: Tensor, shared: Tensor) -> Tensor:
    """The multiple of the prior mean in each sample, by least squares: (B,)."""
    slope = problem.prior.mean / problem.prior.size  # (H,)
    return ((features / problem.prior.size - shared) @ slope) / slope.square().sum().clamp_min(1e-12)


def _residual(problem: LikelihoodProblem, features: Tensor, variance: Tensor) -> float:
    """‖∇W − (1/B) Σ dᵢ fᵢᵀ‖ / ‖∇W‖; an entry known by bounds counts by how far it is outside of them."""
    distortion = problem.distortion
    explained = _errors(problem, features, variance).T @ features
    allowed = torch.minimum(torch.maximum(explained, distortion.low), distortion.high)
    missing = torch.where(distortion.live, problem.gradient, allowed) - explained
    return float(torch.nan_to_num(torch.linalg.matrix_norm(missing) / torch.linalg.matrix_norm(problem.gradient), nan=torch.inf))


def _is_explained(problem: LikelihoodProblem, residual: float, noise: float) -> bool:
    """Whether what is left of the gradient is little more than the noise."""
    expected = noise * float(problem.distortion.live.sum()) ** 0.5 / float(torch.linalg.matrix_norm(problem.gradient))
    return residual**2 - expected**2 <= max(UNEXPLAINED_SHARE, expected) ** 2


def _root_mean_square(problem: LikelihoodProblem) -> float:
    """Of the gradient's entries that are not zero."""
    return float(problem.gradient[problem.gradient != 0].square().mean().sqrt())
