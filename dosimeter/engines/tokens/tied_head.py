"""The part of an embedding's gradient that an output layer with the same weight adds, which is taken off."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dosimeter.engines.subspace.spectrum import rounding_unit
from dosimeter.engines.tokens.span import Span, span_of
from dosimeter.types import Refused

SPARE_ROWS = 64  # of the sketch, beyond the width of the embedding
TIED_SLACK = 8.0  # a row is outside of the output layer's span beyond as many of its error bars
SMALL_SHARE = 0.5  # of the vocabulary: the smallest rows of the gradient, which belong to tokens that do not occur


def head_span(change: Tensor, rng: Generator, *, declared: float = 0.0, most: int | None = None) -> Span:
    """The span of the features, from the rows (V, H) of tokens that do not occur: each is Σ p h over the positions.

    The gradient of the output layer is Σ (p − y) hᵀ. A token that occurs as an input adds a row that is in no span of features; a
    token that is only a target does not. Small rows mostly belong to absent tokens. Half of them show which of the others do not: rows
    outside of the one half's span are left out of the other half, and the rest is the span. `most` is the number of positions, which
    bounds the rank.
    """
    rows = change.to(torch.float64)
    sizes = rows.norm(dim=1)
    small = sizes.argsort()[: int(SMALL_SHARE * len(rows))]
    small = small[sizes[small] > 0]
    small = small[torch.randperm(len(small), generator=rng, device=rng.device).to(small.device)]
    halves = small.tensor_split(2)
    spans = [_span(rows[half], sizes[half], change, rng, declared) for half in halves]
    if any(span.full for span in spans):
        _refuse(spans[0], most)
    kept = [half[_inside(span, rows[half])] for half, span in zip(halves, reversed(spans))]
    absent = torch.cat(kept)
    span = _span(rows[absent], sizes[absent], change, rng, declared)
    if span.full or (most is not None and span.rank > most):
        _refuse(span, most)
    return span


def _inside(span: Span, rows: Tensor) -> Tensor:
    far, bars = span.distances(rows)
    return far <= TIED_SLACK * bars


def _span(rows: Tensor, sizes: Tensor, change: Tensor, rng: Generator, declared: float) -> Span:
    """The span of rows (n, H), each as long as any other unless noise was declared; by a random mixture where they are many."""
    if len(rows) <= change.shape[1]:
        raise Refused("the output layer shares its weight with the embedding, and too few rows of absent tokens show its part")
    scaled = rows / (1 if declared else sizes[:, None])
    if len(scaled) > change.shape[1] + SPARE_ROWS:
        mixing = torch.randn(change.shape[1] + SPARE_ROWS, len(scaled), generator=rng, dtype=torch.float64, device=rng.device)
        scaled = mixing.to(rows.device) @ scaled / len(scaled) ** 0.5
    return span_of(scaled, rounding_unit(change), declared=declared)


def _refuse(span: Span, most: int | None) -> None:
    held = f"{most} positions" if most is not None else "the positions of this batch"
    raise Refused(
        f"the output layer shares its weight with the embedding, and its part of the gradient has rank {span.rank} of {span.columns}: "
        f"{held} leave no direction in which the embedding's part shows alone"
    )
