"""Starts for confident heads: rows that come from one sample alone are extreme points, which successive projection picks."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.engines.subspace.equations import Equations, Span, probabilities, whole_span

ROUNDS = 15  # of alternating features and errors
CONSISTENT_ERROR = 0.3  # relative difference between an error row solved for and one computed, below which a start is kept
VISIBLE_ROW = 4.0  # times the noise that a row must exceed to be used
LAST_LABELS = 3  # labels tried for the last sample
LEAST_SAMPLE_SHARE = 0.2  # of one sample, below which a feature is not updated


def extreme_starts(
    equations: Equations, span: Span, t: Tensor, errors: Tensor, labels: Tensor, *, non_negative: bool
) -> tuple[Tensor, Tensor]:
    """Coordinates (n, B) and labels (n,) of starts, beyond the samples found at `t` (k, B) with `errors` (k, B) and `labels`.

    A class without samples has the row Σ pᵢ fᵢ / B and the bias entry Σ pᵢ / B. Their quotient is a mean of the features. With a
    confident head one sample has nearly all of the probability, and the quotient is its feature: an extreme point. From these, three
    steps alternate: features give errors by ∇W = Dᵀ F / B, errors give labels, and softmax(W f + b) − y gives new features. A confident
    softmax hardly depends on its logits, so they converge. There are none without a bias gradient or with soft targets.
    """
    nothing = t.new_empty(0, equations.rank), labels[:0]
    if equations.bias_target is None or equations.targets is not None or equations.blends:
        return nothing
    rows, bias = _remaining_gradient(equations, t, errors, labels)
    along = rows @ span.lift  # (C, r)
    absent, count = _absent_classes(equations, rows, bias, non_negative=non_negative), along.shape[1]
    if int(absent.sum()) < count:
        return nothing
    points = along[absent] / bias[absent, None]
    features = points[_successive_projection(points, count)]  # (r, r)
    mass = equations.rank * equations.temperature
    best, most = nothing, 0
    for _ in range(ROUNDS):
        solved, failed = torch.linalg.solve_ex(features.T, mass * along.T)  # (r, C) D
        if int(failed) or not bool(torch.isfinite(solved).all()):
            break
        named = solved.argmin(1)
        computed = _plain_errors(equations, probabilities(equations, span, features), named)
        size = torch.linalg.vector_norm(computed, dim=1, keepdim=True)
        off = torch.linalg.vector_norm(solved - computed, dim=1) / size[:, 0]
        good = off < CONSISTENT_ERROR
        if int(good.sum()) > most:
            best, most = (features[good] @ span.lift.T, named[good]), int(good.sum())
        orthogonal, upper = torch.linalg.qr((computed / size).T)  # (C, r), (r, r)
        right = orthogonal.T @ (mass * torch.cat([along, bias[:, None]], 1))
        found = torch.linalg.solve_triangular(upper, right, upper=True) / size  # (r, r + 1) share · (f, 1)
        features = torch.where(found[:, -1:] > LEAST_SAMPLE_SHARE, found[:, :-1] / found[:, -1:].clamp_min(LEAST_SAMPLE_SHARE), features)
    return best


def last_start(equations: Equations, span: Span, t: Tensor) -> tuple[Tensor, Tensor]:
    """Starts for the last sample, if all others are found at `t` (k, B): the direction left over, with the likeliest labels.

    A sample that the model predicts confidently and correctly leaves almost nothing in the gradient, less than the last digits of the
    others. But its feature is orthogonal to their errors. The start has the median length of the others' features, and its labels are
    those that the head predicts there.
    """
    direction = span.lift.T * equations.spectrum.values.square().mean().sqrt()  # (1, B)
    length = torch.linalg.vector_norm(t * equations.spectrum.values, dim=1).median()
    size = torch.linalg.vector_norm(direction * equations.spectrum.values)
    towards = torch.sign((direction @ equations.basis).sum())  # non-negative features have a positive sum
    points = (towards * direction * length / size).expand(LAST_LABELS, -1)
    return points, probabilities(equations, whole_span(equations), points[:1])[0].topk(LAST_LABELS).indices


def _remaining_gradient(equations: Equations, t: Tensor, errors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient's rows in coordinates (C, B) and its bias (C,), after subtracting the samples found."""
    weights = equations.spectrum.weights
    assert equations.bias_target is not None
    rows, bias = equations.spectrum.left / weights[:, None], equations.bias_target / weights
    d = _plain_errors(equations, torch.softmax(t @ equations.logits.T + equations.bias, 1), labels)
    shares = d / (t * errors).sum(1, keepdim=True)  # (k, C)
    return rows - shares.T @ t, bias - shares.sum(0)


def _plain_errors(equations: Equations, p: Tensor, labels: Tensor) -> Tensor:
    """softmax(z) − y without weights: (n, C)."""
    d = p - equations.even
    d[torch.arange(len(labels), device=labels.device), labels] -= equations.share
    return d


def _absent_classes(equations: Equations, rows: Tensor, bias: Tensor, *, non_negative: bool) -> Tensor:
    """Classes whose row exceeds the noise and can be a sum of features with positive weights: (C,) bool."""
    entries = rows @ equations.basis  # (C, H)
    floor = VISIBLE_ROW * equations.spectrum.noise / equations.spectrum.weights
    absent = (bias > 0) & (torch.linalg.vector_norm(entries, dim=1) > floor * entries.shape[1] ** 0.5)
    return absent & (entries.amin(1) >= -floor) if non_negative else absent


def _successive_projection(points: Tensor, count: int) -> Tensor:
    """Indices (count,) of extreme points (Araújo et al. 2001): the longest, then the longest orthogonal to those picked, and so on."""
    left, picked = points, []
    for _ in range(count):
        longest = left.square().sum(1).argmax()
        picked.append(longest)
        direction = left[longest] / torch.linalg.vector_norm(left[longest]).clamp_min(torch.finfo(left.dtype).tiny)
        left = left - (left @ direction)[:, None] * direction
    return torch.stack(picked)
