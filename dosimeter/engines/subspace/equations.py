"""The equations that one sample satisfies on its own: its feature in the gradient's row space, its error in the column space.

Notation: z = W f + b, ∇W = (1/B) Σ dᵢ fᵢᵀ with dᵢ = softmax(zᵢ) − yᵢ, and diag(w) ∇W = U S Vᵀ (spectrum.py). A feature is written
f = V S t, so t says which mixture of the gradient's rows it is. Then for every true sample

    (I − U Uᵀ) w∘d(t) = 0              C − 1 − B equations for B unknowns, free of the other samples
    tᵢ · eⱼ = B δᵢⱼ,  eⱼ = Uᵀ w∘dⱼ      which ties the samples to each other

The second is what `f G⁺ d` is for a sum of outer products; it says that a found sample can be peeled off without knowing any scale.

What a sample may aim at is numbered, and `labels` holds these numbers: a class, a row of `targets` where soft labels are given, or a
pair of classes whose blend is unknown, first · C + second. A blend y = (1 − μ) e_a + μ e_b takes one equation: μ is wherever it makes
the others smallest, a linear problem, and d and its slopes follow (variable projection, Golub & Pereyra 1973).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.subspace.spectrum import Spectrum


@dataclass(frozen=True, kw_only=True)
class Equations:
    """A head, its gradient's spectrum, and what its loss aims at."""

    spectrum: Spectrum
    weight: Tensor  # (C, H) divided by the loss's temperature
    bias: Tensor  # (C,) likewise, zeros where the layer has none
    share: float  # the weight of the label in its target, 1 − ε with smoothing
    even: float  # what every class gets on top, ε/C with smoothing
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
    """The spaces of the samples that are not found yet, within those of the whole gradient."""

    left: Tensor  # (C, r) the error rows, weighed, lie in here
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
    """All in float64; `smoothing` is PyTorch's ε."""
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
    """The noise of one weighed entry of the bias gradient: added alike everywhere, or rounded in proportion."""
    size = torch.linalg.vector_norm(spectrum.left * spectrum.values, dim=1) / spectrum.right.shape[1] ** 0.5  # (C,) of a row's entries
    relative = (spectrum.weights * bias_gradient).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    return spectrum.noise * (1.0 if spectrum.additive else max(float(relative.square().mean().sqrt()), 1e-6))


def whole_span(equations: Equations) -> Span:
    eye = torch.eye(equations.rank, dtype=equations.basis.dtype, device=equations.basis.device)
    return Span(left=equations.spectrum.left, logits=equations.logits, lift=eye)


def peel(equations: Equations, coordinates: Tensor, errors: Tensor) -> Span:
    """The spaces left when the samples at `coordinates` (k, B), with error rows `errors` (k, B), are taken off.

    By tᵢ·eⱼ = B δᵢⱼ the others' coordinates are orthogonal to these errors, and their errors to these coordinates.
    """
    count = len(coordinates)
    if count == 0:
        return whole_span(equations)
    lift = torch.linalg.qr(_unit_rows(errors).T, mode="complete").Q[:, count:]  # (B, r)
    rows = torch.linalg.qr(_unit_rows(coordinates).T, mode="complete").Q[:, count:]
    return Span(left=equations.spectrum.left @ rows, logits=equations.logits @ lift, lift=lift)


def tolerant_span(equations: Equations, span: Span) -> Span:
    """The same unknowns with only those equations that do not trust the coordinates of what was peeled, if they suffice.

    A found sample's error row hardly depends on its feature's last digits; its coordinates do, and an inexact one misleads the rest.
    """
    enough = equations.classes - 1 - equations.rank >= 1.5 * span.logits.shape[1] + 4
    return Span(left=equations.spectrum.left, logits=span.logits, lift=span.lift) if enough else span


def probabilities(equations: Equations, span: Span, t: Tensor) -> Tensor:
    """(n, r) -> (n, C)."""
    return torch.softmax(t @ span.logits.T + equations.bias, 1)


def weighted_errors(equations: Equations, span: Span, p: Tensor, labels: Tensor) -> Tensor:
    """w ∘ (softmax(z) − y) for one label a row, blends where they fit `span` best: (n, C)."""
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
    """The class that each label means, the first of a pair, the largest of a soft one: (n,)."""
    if equations.targets is not None:
        return equations.targets.argmax(1)[labels]
    return labels // equations.classes if equations.blends else labels


def blend_directions(equations: Equations, span: Span, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where more of the second class leads, a = share · w∘(e_first − e_second), and its dual off the space, q/‖q‖² with q = (I − UUᵀ) a.

    Errors d then have their blend at μ = −d·q/‖q‖². Both (n, C); zero where the two classes are one.
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
    """The derivative of the errors in t: diag(w∘p)(K − 1 pᵀK), blends following: (n, C, r)."""
    slope = (p * equations.spectrum.weights)[:, :, None] * (span.logits - (p @ span.logits)[:, None, :])
    if not equations.blends or labels is None:
        return slope
    across, along = blend_directions(equations, span, labels)
    return slope - across[:, :, None] * (along[:, None, :] @ slope)


def transposed_slopes(equations: Equations, span: Span, p: Tensor, rows: Tensor) -> Tensor:
    """The transposed slopes, at a fixed blend, applied to one row a sample, none of them built: (n, C) -> (n, r)."""
    weighed = equations.spectrum.weights * p * rows
    return weighed @ span.logits - weighed.sum(1, keepdim=True) * (p @ span.logits)


def mean_coordinates(equations: Equations, gradient: Tensor, bias_gradient: Tensor | None) -> Tensor:
    """Where every search begins: the mean feature, weighted by the probability of classes that look absent: (B,).

    An absent class's row is Σ pᵢ fᵢ / B, and its bias entry Σ pᵢ / B, so their sums' quotient is a mean feature, whatever
    the scale of the gradient. Without a bias, absent are the rows that point the way most rows do, and p is found by iteration.
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
    """Each class's row as if one sample had made it, ∇W_c/∇b_c: (C, B).

    Where the model is confident few samples share a row, and such a quotient is nearly one of them. Without a bias gradient
    the row is given the mean feature's length.
    """
    rows = gradient @ equations.spectrum.right.T / equations.spectrum.values  # (C, B)
    if bias_gradient is not None:
        return rows / _bounded_off_zero(bias_gradient)[:, None]
    length = torch.linalg.vector_norm(start * equations.spectrum.values)
    sign = torch.sign(rows @ (start * equations.spectrum.values.square()))[:, None]
    return sign * rows * length / _bounded_off_zero(torch.linalg.vector_norm(rows * equations.spectrum.values, dim=1, keepdim=True))


def _bounded_off_zero(numbers: Tensor) -> Tensor:
    least = 1e-12 * numbers.abs().amax().clamp_min(torch.finfo(numbers.dtype).tiny)
    return torch.where(numbers.abs() < least, least, numbers)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
