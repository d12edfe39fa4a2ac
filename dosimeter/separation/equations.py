"""The equations that one sample satisfies on its own: its feature in the gradient's row space, its error in the column space.

Notation: z = W f + b, ∇W = (1/B) Σ dᵢ fᵢᵀ with dᵢ = softmax(zᵢ) − yᵢ, and diag(w) ∇W = U S Vᵀ (spectrum.py). A feature is written
f = V S t, so t says which mixture of the gradient's rows it is. Then for every true sample

    (I − U Uᵀ) w∘d(t) = 0              C − 1 − B equations for B unknowns, free of the other samples
    tᵢ · eⱼ = B δᵢⱼ,  eⱼ = Uᵀ w∘dⱼ      which ties the samples to each other

The second is what `f G⁺ d` is for a sum of outer products; it says that a found sample can be peeled off without knowing any scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.separation.spectrum import Spectrum


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


def whole(equations: Equations) -> Span:
    eye = torch.eye(equations.rank, dtype=equations.basis.dtype, device=equations.basis.device)
    return Span(left=equations.spectrum.left, logits=equations.logits, lift=eye)


def peeled(equations: Equations, coordinates: Tensor, errors: Tensor) -> Span:
    """The spaces left when the samples at `coordinates` (k, B), with error rows `errors` (k, B), are taken off.

    By tᵢ·eⱼ = B δᵢⱼ the others' coordinates are orthogonal to these errors, and their errors to these coordinates.
    """
    count = len(coordinates)
    if count == 0:
        return whole(equations)
    lift = torch.linalg.qr(_unit_rows(errors).T, mode="complete").Q[:, count:]  # (B, r)
    rows = torch.linalg.qr(_unit_rows(coordinates).T, mode="complete").Q[:, count:]
    return Span(left=equations.spectrum.left @ rows, logits=equations.logits @ lift, lift=lift)


def forgiving(equations: Equations, span: Span) -> Span:
    """The same unknowns with only those equations that do not trust the coordinates of what was peeled, if they suffice.

    A found sample's error row hardly depends on its feature's last digits; its coordinates do, and an inexact one misleads the rest.
    """
    enough = equations.classes - 1 - equations.rank >= 1.5 * span.logits.shape[1] + 4
    return Span(left=equations.spectrum.left, logits=span.logits, lift=span.lift) if enough else span


def probabilities(equations: Equations, span: Span, t: Tensor) -> Tensor:
    """(n, r) -> (n, C)."""
    return torch.softmax(t @ span.logits.T + equations.bias, 1)


def weighed_errors(equations: Equations, p: Tensor, labels: Tensor) -> Tensor:
    """w ∘ (softmax(z) − y) for one label a row: (n, C)."""
    d = p - equations.even
    d[torch.arange(len(labels), device=labels.device), labels] -= equations.share
    return d * equations.spectrum.weights


def off_space(span: Span, rows: Tensor) -> Tensor:
    """The part of each row outside the column space: (n, C)."""
    return rows - (rows @ span.left) @ span.left.T


def slopes(equations: Equations, span: Span, p: Tensor) -> Tensor:
    """The derivative of w∘softmax(z) in t: diag(w∘p)(K − 1 pᵀK): (n, C, r)."""
    return (p * equations.spectrum.weights)[:, :, None] * (span.logits - (p @ span.logits)[:, None, :])


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


def row_coordinates(equations: Equations, gradient: Tensor, bias_gradient: Tensor | None, start: Tensor, most: int) -> Tensor:
    """Each class's row as if one sample had made it, ∇W_c/∇b_c: (m, B), the m ≤ `most` largest rows.

    Where the model is confident few samples share a row, and such a quotient is nearly one of them. Without a bias gradient
    the row is given the mean feature's length.
    """
    along = gradient @ equations.spectrum.right.T / equations.spectrum.values  # (C, B)
    largest = (gradient.square().sum(1) * equations.spectrum.weights.square()).topk(min(most, len(gradient))).indices
    if bias_gradient is not None:
        return along[largest] / _away_from_zero(bias_gradient[largest])[:, None]
    length = torch.linalg.vector_norm(start * equations.spectrum.values)
    rows = along[largest]
    sign = torch.sign(rows @ (start * equations.spectrum.values.square()))[:, None]
    return sign * rows * length / torch.linalg.vector_norm(rows * equations.spectrum.values, dim=1, keepdim=True)


def _away_from_zero(numbers: Tensor) -> Tensor:
    least = 1e-12 * numbers.abs().amax().clamp_min(torch.finfo(numbers.dtype).tiny)
    return torch.where(numbers.abs() < least, least, numbers)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
