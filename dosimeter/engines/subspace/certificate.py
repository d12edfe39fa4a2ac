"""How far a solution can be from the truth: an error bar from the noise, the conditioning and the residual.

To first order, noise E on the weighted gradient turns its column space by (I − UUᵀ) E V S⁻¹ and its row space by (I − VVᵀ) Eᵀ U S⁻¹.
With σ the size of one entry of E, a sample with coordinates t and error e = Uᵀ w∘d has

    equations that are off by               σ ‖S⁻¹ e‖ per class, and by w p σ ‖t‖ ‖W(I − VVᵀ)‖ through the logits,
    a feature that leaves the row space by  σ ‖t‖ per coordinate.

The inverse slopes carry these errors into the feature. A larger residual raises σ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.subspace.equations import (
    Equations,
    blend_directions,
    blend_shares,
    probabilities,
    project_off,
    transposed_slopes,
    weighted_errors,
    whole_span,
)
from dosimeter.engines.subspace.single import newton_step, sensitivities

DEVIATIONS = 8.0  # an error bar is this many standard deviations
ROUNDINGS = 1.5  # rounding errors of the model's forward pass, in units of its epsilon
REPEATABILITY = 32.0  # the smallest error bar in epsilons: a feature computed in another order of operations differs by some
PAIR_FREEDOM = 4  # spare equations below which one of thousands of class pairs may fit by chance
LARGEST_MISFIT = 16.0  # residual energy over expected energy, above which the solution is no sample


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What can be said of solutions without knowing the truth; one entry a sample."""

    error_bar: Tensor  # (n,) on the relative feature error
    misfit: Tensor  # (n,) residual energy over the energy expected from the noise
    residual: Tensor  # (n,) ‖(I − UUᵀ) w∘d‖ / ‖w∘d‖
    mass: Tensor  # (n,) t·e: the batch size over the number of times that the sample occurs, over the gradient's scale
    mass_bar: Tensor  # (n,) error bar of the mass
    errors: Tensor  # (n, B) e
    isolated: Tensor  # (n,) bool: within its error bar the solution is a point and not a curve
    second_share: Tensor  # (n,) μ, where labels blend two classes; else 0
    second_bar: Tensor  # (n,) on μ


def assess(equations: Equations, t: Tensor, labels: Tensor, inverse: Tensor) -> Assessment:
    """`inverse` (n, B, B): inverse Cholesky factor of the slopes' normal matrix at `t`, from `polish`."""
    span, spectrum = whole_span(equations), equations.spectrum
    p = probabilities(equations, span, t)
    error = weighted_errors(equations, span, p, labels)
    left_over = project_off(span, error)
    e = error @ spectrum.left  # (n, B)
    feature_size = torch.linalg.vector_norm(t * spectrum.values, dim=1)
    expected = equation_variance(equations, t, p, e)  # (n, C)
    freedom = spectrum.informative - 1 - 2 * equations.rank - equations.blends
    misfit = left_over.square().sum(1) / (expected.mean(1) * max(freedom, 1))
    uncertain = 1 + 3 * (2 / max(freedom, 1)) ** 0.5  # few spare equations measure the noise poorly
    raised = (misfit * uncertain).clamp_min(1)
    inside = (expected * sensitivities(equations, t, labels, inverse)).sum(1) * raised
    outside = spectrum.noise**2 * t.square().sum(1) * equations.weight.shape[1]
    bar = DEVIATIONS * (inside + outside).sqrt() / feature_size
    if freedom < (PAIR_FREEDOM if equations.blends else 2):
        bar = torch.full_like(bar, torch.inf)
    share, share_bar = _second_shares(equations, t, p, labels, inverse, expected.amax(1) * raised)
    return Assessment(
        error_bar=add_repeatability(equations, bar),
        misfit=misfit,
        residual=torch.linalg.vector_norm(left_over, dim=1) / torch.linalg.vector_norm(error, dim=1),
        mass=(t * e).sum(1),
        mass_bar=_mass_bar(equations, t, p, labels, e, inverse, expected * raised[:, None]),
        errors=e,
        isolated=_is_isolated(equations, t, labels, inverse, bar * feature_size),
        second_share=share,
        second_bar=share_bar,
    )


def equation_variance(equations: Equations, t: Tensor, p: Tensor, e: Tensor) -> Tensor:
    """The variance of each equation: turned column space, turned row space, rounding of the forward pass: (n, C)."""
    spectrum = equations.spectrum
    column = spectrum.noise**2 * (e / spectrum.values).square().sum(1, keepdim=True)
    row = spectrum.noise**2 * t.square().sum(1, keepdim=True) * (spectrum.weights * p).square() * equations.outside
    return column + row + forward_variance(equations, t, p)


def forward_variance(equations: Equations, t: Tensor, p: Tensor) -> Tensor:
    """The part of that variance that comes from rounding the logits and the softmax in the forward pass: (n, C)."""
    size = 1 + (t @ equations.logits.T + equations.bias).abs()
    return (ROUNDINGS * equations.model_unit * equations.spectrum.weights * p * size).square()


def _second_shares(equations: Equations, t: Tensor, p: Tensor, labels: Tensor, inverse: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """μ and its error bar, (n,) and (n,): from the noise along q, and from the error of the coordinates.

    μ = −d·q/‖q‖², so ∂μ/∂t = −qᵀM/‖q‖², M the slopes at a fixed blend; noise along q does not move t.
    """
    if not equations.blends:
        return torch.zeros_like(variance), torch.zeros_like(variance)
    span = whole_span(equations)
    _, along = blend_directions(equations, span, labels)
    by_t = transposed_slopes(equations, span, p, along)  # (n, B)
    spread = along.square().sum(1) + (inverse @ by_t[:, :, None]).square().sum((1, 2))
    return blend_shares(equations, span, p, labels), DEVIATIONS * (variance * spread).sqrt()


def _mass_bar(equations: Equations, t: Tensor, p: Tensor, labels: Tensor, e: Tensor, inverse: Tensor, variance: Tensor) -> Tensor:
    """The error bar of the mass t·e, from the variance of each equation (n, C): (n,).

    ∂(t·e)/∂t = e + Mᵀ U t carries the error of the coordinates. Noise E on the gradient also moves t·e by tᵀ UᵀE V S⁻¹e, and its part
    along q moves the blend. The mass may be wrong by its whole size although the feature is exact: two similar samples leave a small
    singular value, and coordinates along its direction hardly move the feature.
    """
    span, spectrum = whole_span(equations), equations.spectrum
    across = along = torch.zeros_like(p)
    if equations.blends:
        across, along = blend_directions(equations, span, labels)
    towards = t @ spectrum.left.T  # (n, C) U t
    follows = (across * towards).sum(1, keepdim=True)
    by_t = e + transposed_slopes(equations, span, p, towards) - follows * transposed_slopes(equations, span, p, along)
    step = (inverse.transpose(1, 2) @ (inverse @ by_t[:, :, None]))[:, :, 0]
    pushed = step @ span.logits.T
    pushed = spectrum.weights * p * (pushed - (p * pushed).sum(1, keepdim=True))  # slopes @ step, at a fixed blend
    pushed = project_off(span, pushed - (along * pushed).sum(1, keepdim=True) * across)
    inside = (variance * (pushed + follows * along).square()).sum(1)
    turned = spectrum.noise**2 * t.square().sum(1) * (e / spectrum.values).square().sum(1)
    mass = (t * e).sum(1).abs()
    return mass * add_repeatability(equations, DEVIATIONS * (inside + turned).sqrt() / mass)


def add_repeatability(equations: Equations, bar: Tensor) -> Tensor:
    """The error bar, widened by what another order of operations changes in the same forward pass."""
    return torch.hypot(torch.nan_to_num(bar, nan=torch.inf), torch.full_like(bar, REPEATABILITY * equations.model_unit))


def _is_isolated(equations: Equations, t: Tensor, labels: Tensor, inverse: Tensor, reach: Tensor) -> Tensor:
    """Whether one Gauss–Newton step leads back from either end of the longest axis of the error ellipsoid: (n,) bool."""
    usable = torch.isfinite(inverse).all(2).all(1) & torch.isfinite(reach)
    result = torch.zeros_like(usable)
    if not bool(usable.any()):
        return result
    span, values = whole_span(equations), equations.spectrum.values
    t, labels, inverse, reach = t[usable], labels[usable], inverse[usable], reach[usable]
    axis = torch.ones_like(t)
    for _ in range(12):  # power iteration on the features' covariance S (slopesᵀ slopes)⁻¹ S
        axis = values * (inverse.transpose(1, 2) @ (inverse @ (values * axis)[:, :, None]))[:, :, 0]
        axis = axis / torch.linalg.vector_norm(axis, dim=1, keepdim=True)
    away = axis * reach[:, None] / values
    back = [torch.linalg.vector_norm((newton_step(equations, span, t + sign * away, labels) - t) * values, dim=1) for sign in (-1, 1)]
    result[usable] = torch.maximum(*back) < 0.5 * reach
    return result
