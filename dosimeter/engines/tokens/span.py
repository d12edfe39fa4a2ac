"""The row space of a layer's gradient, and how far a vector is from it: in proportion to what noise explains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.subspace.spectrum import NOISE_SLACK, ROUNDING_SLACK, noise_edge

OWN_ROUNDINGS = 16.0  # rounding units by which a vector that is computed twice may differ

FREE_DIRECTIONS = 4  # that a span must leave, so that a vector is not in it by accident


@dataclass(frozen=True, kw_only=True)
class Span:
    """G = U S Vᵀ + noise. Each row of G is a combination of what the layer received."""

    right: Tensor  # (r, d) Vᵀ
    values: Tensor  # (r,) S, descending
    noise: float  # standard deviation of one entry of G
    unit: float  # relative rounding of what the layer received
    columns: int  # d
    gap: float  # the last singular value that counts, over the largest that noise explains
    noise_is_large: bool = False  # noise was declared, so that vectors of the span may be far from it

    @property
    def rank(self) -> int:
        return len(self.values)

    @property
    def full(self) -> bool:
        """Whether too few directions are left for a vector outside of the span to show. A layer norm takes one away by itself."""
        return self.rank > self.columns - FREE_DIRECTIONS

    def distances(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """How far vectors (n, d) are from the span, and how far noise alone puts a vector of the span: (n,) each, relative.

        A vector of the span is x = wᵀ(G − N) with w = U S⁻¹ Vᵀ x. Outside of the span noise leaves wᵀN, of size ‖w‖ σ √(d − r).
        """
        vectors = vectors.to(self.right)
        length = vectors.norm(dim=1).clamp_min(torch.finfo(vectors.dtype).tiny)
        inside = vectors @ self.right.T  # (n, r)
        outside = (length.square() - inside.square().sum(1)).clamp_min(0).sqrt()
        near = outside < 1e-5 * length  # where the difference of squares is rounding
        if bool(near.any()):
            outside[near] = (vectors[near] - inside[near] @ self.right).norm(dim=1)
        weights = (inside / self.values).norm(dim=1)
        bars = torch.hypot(weights * self.noise * math.sqrt(max(self.columns - self.rank, 1)), OWN_ROUNDINGS * self.unit * length)
        return outside / length, bars / length


def span_of(gradient: Tensor, unit: float, *, declared: float = 0.0) -> Span:
    """The row space of a (m, d) gradient whose entries were rounded to `unit`, relative, after noise of size `declared` was added.

    The rank is the number of singular values above the edge of the noise's spectrum (Marchenko & Pastur 1967).
    """
    matrix = gradient.to(torch.float64)
    matrix = matrix[matrix.any(1)]
    rows, columns = len(matrix), gradient.shape[1]
    if rows == 0:
        return Span(right=matrix[:0], values=matrix.new_zeros(0), noise=0.0, unit=unit, columns=columns, gap=0.0)
    if rows > 2 * columns:
        matrix = torch.linalg.qr(matrix, mode="r").R
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rounding = unit * float(gradient.double().square().mean().sqrt())
    edge = max(
        ROUNDING_SLACK * noise_edge(rounding, rows, columns),
        NOISE_SLACK * noise_edge(declared, rows, columns),
        20 * torch.finfo(values.dtype).eps * float(values[0]),
    )
    rank = int((values > edge).sum())
    tail = float(values[rank:].square().sum().div(max((rows - rank) * (columns - rank), 1)).sqrt())
    largest = float(values[rank]) if rank < len(values) else 0.0
    return Span(
        right=right[:rank],
        values=values[:rank],
        noise=max(tail, declared, rounding),
        unit=unit,
        columns=columns,
        noise_is_large=declared > 0,
        gap=float(values[rank - 1]) / max(largest, edge) if rank else 0.0,
    )
