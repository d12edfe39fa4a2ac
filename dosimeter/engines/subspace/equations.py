"""The equations that one sample satisfies on its own: its feature in the gradient's row space, its error in the column space.

Notation: z = W f + b, ∇W = (1/B) Σ dᵢ fᵢᵀ with dᵢ = softmax(zᵢ) − yᵢ, and diag(w) ∇W = U S Vᵀ (spectrum.py). A feature is f = V S t: t
mixes the gradient's rows. Then for every true sample

    (I − U Uᵀ) w∘d(t) = 0              C − 1 − B equations for B unknowns, free of the other samples
    tᵢ · eⱼ = B δᵢⱼ,  eⱼ = Uᵀ w∘dⱼ      which ties the samples to each other

By the second line, a found sample can be peeled off although no scale is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.subspace.spectrum import Spectrum


@dataclass(frozen=True, kw_only=True)
class Equations:
    """A head, its gradient's spectrum, and what its loss aims at.

    Functions take `labels`, one number a sample: a class, a row of `targets` for given soft labels, or first · C + second for a pair of
    classes whose blend is unknown. An unknown blend y = (1 − μ) e_a + μ e_b uses up one equation. μ minimises the residual of the
    others, which is a linear problem, and d and its slopes follow μ (variable projection, Golub & Pereyra 1973).
    """

    spectrum: Spectrum
    weight: Tensor  # (C, H) divided by the loss's temperature
    bias: Tensor  # (C,) likewise, zeros where the layer has none
    share: float  # the weight of the label in its target, 1 − ε with smoothing
    even: float  # added to every class's target, ε/C with smoothing
    temperature: float  # of the loss, which divides the gradient
    model_unit: float  # relative rounding of the model's own forward pass
    bias_target: Tensor | None  # (C,) w∘∇b, where the client sent it
    bias_noise: float  # standard deviation of one of its entries
    basis: Tensor  # (B, H) S Vᵀ: features = t @ basis
    logits: Tensor  # (C, B) W basisᵀ
    outside: Tensor  # (C,) squared length of each weight row off the row space
    targets: Tensor | None = None  # (m, C) soft labels that samples may have
    blends: bool = False  # labels are pairs of classes

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def rank(self) -> int:
        return self.spectrum.rank


@dataclass(frozen=True, kw_only=True)
class Span:
    """The row and column space of the samples still to be found, inside those of the whole gradient."""

    left: Tensor  # (C, r) orthonormal; holds the weighted error rows
    logits: Tensor  # (C, r) logits per coordinate
    lift: Tensor  # (B, r) coordinates in the whole problem = lift @ coordinates here


def build_equations(
    spectrum: Spectrum,
    weight: Tensor,
    bias: Tensor | None,
    *,
    model_unit: float,
    bias_gradient: Tensor | None = None,
    smoothing: float = 0.0,
    temperature: float = 1.0,
) -> Equations:
    """The equations of a head, all in float64; `smoothing` is PyTorch's ε."""
    target = None if bias_gradient is None else spectrum.weights * bias_gradient
    weight = weight / temperature
    basis = spectrum.values[:, None] * spectrum.right
    along = weight @ spectrum.right.T  # (C, B)
    return Equations(
        spectrum=spectrum,
        weight=weight,
        bias=torch.zeros_like(weight[:, 0]) if bias is None else bias / temperature,
        share=1 - smoothing,
        even=smoothing / len(weight),
        temperature=temperature,
        model_unit=model_unit,
        bias_target=target,
        bias_noise=1.0 if bias_gradient is None else _bias_noise(spectrum, bias_gradient),
        basis=basis,
        logits=along * spectrum.values,
        outside=(weight.square().sum(1) - along.square().sum(1)).clamp_min(0),
    )


def _bias_noise(spectrum: Spectrum, bias_gradient: Tensor) -> float:
    """The noise of one weighted entry of the bias gradient: that of the weight gradient if it was added, else in proportion to the size."""
    size = torch.linalg.vector_norm(spectrum.left * spectrum.values, dim=1) / spectrum.right.shape[1] ** 0.5  # (C,) of a row's entries
    relative = (spectrum.weights * bias_gradient).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    return spectrum.noise * (1.0 if spectrum.additive else max(float(relative.square().mean().sqrt()), 1e-6))


def whole_span(equations: Equations) -> Span:
    """The spaces of the whole gradient: no sample is peeled off."""
    eye = torch.eye(equations.rank, dtype=equations.basis.dtype, device=equations.basis.device)
    return Span(left=equations.spectrum.left, logits=equations.logits, lift=eye)


def peel(equations: Equations, coordinates: Tensor, errors: Tensor) -> Span:
    """The spaces of the other samples, without those at `coordinates` (k, B) with error rows `errors` (k, B).

    By tᵢ·eⱼ = B δᵢⱼ, the other samples' coordinates are orthogonal to these errors, and their errors to these coordinates.
    """
    count = len(coordinates)
    if count == 0:
        return whole_span(equations)
    lift = torch.linalg.qr(_unit_rows(errors).T, mode="complete").Q[:, count:]  # (B, r)
    rows = torch.linalg.qr(_unit_rows(coordinates).T, mode="complete").Q[:, count:]
    return Span(left=equations.spectrum.left @ rows, logits=equations.logits @ lift, lift=lift)


def tolerant_span(equations: Equations, span: Span) -> Span:
    """The same unknowns under fewer equations: those that use the peeled samples' coordinates are left out, if the rest suffice.

    A peeled sample's coordinates depend on the last digits of its feature, and an inexact one spoils those equations. Its error row
    hardly depends on them.
    """
    enough = equations.classes - 1 - equations.rank >= 1.5 * span.logits.shape[1] + 4
    return Span(left=equations.spectrum.left, logits=span.logits, lift=span.lift) if enough else span


def probabilities(equations: Equations, span: Span, t: Tensor) -> Tensor:
    """softmax(z) at the coordinates: (n, r) -> (n, C)."""
    return torch.softmax(t @ span.logits.T + equations.bias, 1)


def weighted_errors(equations: Equations, span: Span, p: Tensor, labels: Tensor) -> Tensor:
    """w ∘ (softmax(z) − y) for one label a row: (n, C). A blend takes the share that fits `span` best."""
    d = p - equations.even
    if equations.targets is not None:
        return (d - equations.share * equations.targets[labels]) * equations.spectrum.weights
    d[torch.arange(len(labels), device=labels.device), labels // equations.classes if equations.blends else labels] -= equations.share
    d = d * equations.spectrum.weights
    if not equations.blends:
        return d
    across, along = blend_directions(equations, span, labels)
    return d - (d * along).sum(1, keepdim=True) * across


def main_classes(equations: Equations, labels: Tensor) -> Tensor:
    """The class of each label: the first of a pair, the largest entry of a soft label: (n,)."""
    if equations.targets is not None:
        return equations.targets.argmax(1)[labels]
    return labels // equations.classes if equations.blends else labels


def blend_directions(equations: Equations, span: Span, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The direction of the second class a = share · w∘(e_first − e_second), and q/‖q‖² with q = (I − UUᵀ) a: (n, C) each.

    Errors d have their blend at μ = −d·q/‖q‖². Both are zero where the two classes are one.
    """
    index, weights = torch.arange(len(labels), device=labels.device), equations.share * equations.spectrum.weights
    first, second = labels // equations.classes, labels % equations.classes
    across = weights.new_zeros(len(labels), equations.classes)
    across[index, first] += weights[first]
    across[index, second] -= weights[second]
    off = project_off(span, across)
    return across, off / off.square().sum(1, keepdim=True).clamp_min(torch.finfo(off.dtype).tiny)


def blend_shares(equations: Equations, span: Span, p: Tensor, labels: Tensor) -> Tensor:
    """μ, the share of the second class of each pair: (n,)."""
    _, along = blend_directions(equations, span, labels)
    d = weighted_errors(replace(equations, blends=False), span, p, labels // equations.classes)
    return -(d * along).sum(1)


def project_off(span: Span, rows: Tensor) -> Tensor:
    """The part of each row outside the column space: (n, C)."""
    return rows - (rows @ span.left) @ span.left.T


def slopes(equations: Equations, span: Span, p: Tensor, labels: Tensor | None = None) -> Tensor:
    """The derivative of the errors in t, diag(w∘p)(K − 1 pᵀK), with the blend following t: (n, C, r)."""
    slope = (p * equations.spectrum.weights)[:, :, None] * (span.logits - (p @ span.logits)[:, None, :])
    if not equations.blends or labels is None:
        return slope
    across, along = blend_directions(equations, span, labels)
    return slope - across[:, :, None] * (along[:, None, :] @ slope)


def transposed_slopes(equations: Equations, span: Span, p: Tensor, rows: Tensor) -> Tensor:
    """The transposed slopes at a fixed blend times one row a sample: (n, C) -> (n, r). The slopes themselves are not built."""
    weighed = equations.spectrum.weights * p * rows
    return weighed @ span.logits - weighed.sum(1, keepdim=True) * (p @ span.logits)


def mean_coordinates(equations: Equations, gradient: Tensor, bias_gradient: Tensor | None) -> Tensor:
    """The coordinates of a mean feature, where every search begins: (B,).

    The row of a class without samples is Σ pᵢ fᵢ / B, and its bias entry Σ pᵢ / B. The quotient of their sums over all such classes is a
    weighted mean of the features, whatever the gradient's scale. Without a bias gradient, a class counts as absent if its row points
    the way most rows do, and p is found by iteration.
    """
    if bias_gradient is not None and bool((bias_gradient > 0).any()):
        absent = bias_gradient > 0
        feature = gradient[absent].sum(0) / bias_gradient[absent].sum()
    else:
        along = gradient @ equations.spectrum.right[0]  # (C,)
        absent = along * torch.sign(along.median()) > 0
        rows = gradient[absent].sum(0)
        feature = rows * equations.classes / absent.sum()
        for _ in range(5):
            p = torch.softmax(equations.weight @ feature + equations.bias, 0)
            feature = rows / p[absent].sum().clamp_min(1e-3)
    return (equations.spectrum.right @ feature) / equations.spectrum.values


def row_coordinates(equations: Equations, gradient: Tensor, bias_gradient: Tensor | None, start: Tensor) -> Tensor:
    """The coordinates of ∇W_c/∇b_c, the feature of class c's row if one sample made it: (C, B).

    In a confident model few samples share a row, so the quotient is close to one of them. Without a bias gradient the row is scaled
    to the mean feature's length.
    """
    rows = gradient @ equations.spectrum.right.T / equations.spectrum.values  # (C, B)
    if bias_gradient is not None:
        return rows / _bounded_off_zero(bias_gradient)[:, None]
    length = torch.linalg.vector_norm(start * equations.spectrum.values)
    sign = torch.sign(rows @ (start * equations.spectrum.values.square()))[:, None]
    return sign * rows * length / _bounded_off_zero(torch.linalg.vector_norm(rows * equations.spectrum.values, dim=1, keepdim=True))


def _bounded_off_zero(numbers: Tensor) -> Tensor:
    """The numbers as divisors: those next to zero are replaced by a small positive one."""
    least = 1e-12 * numbers.abs().amax().clamp_min(torch.finfo(numbers.dtype).tiny)
    return torch.where(numbers.abs() < least, least, numbers)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
