"""Finds the samples of a gradient one by one: scan all classes, solve, peel off what is found, and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.separation.certificate import equation_variance
from dosimeter.separation.equations import Equations, Span, forgiving, peeled, probabilities, weighed_errors, whole
from dosimeter.separation.single import linear_scan, solve

PLAUSIBLE = 0.45  # linear residual above which a class is tried only when nothing better is left
CLOSE = 1e-3  # relative distance below which two solutions of one label are the same
MOST_STARTS = 256  # of one round
GOOD = 1e-6  # squared relative residual of a solution, where noise does not ask for more


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Solutions in the coordinates of the whole problem."""

    t: Tensor  # (n, B)
    labels: Tensor  # (n,)
    errors: Tensor  # (n, B) Uᵀ w∘d
    value: Tensor  # (n,) squared relative residual, in the space that was left when the solution was found

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, index: Tensor) -> Candidates:
        return Candidates(t=self.t[index], labels=self.labels[index], errors=self.errors[index], value=self.value[index])


def search(
    equations: Equations, start: Tensor, others: Tensor, wanted: Tensor | None, rng: Generator, *, attempts: int, starts: int
) -> Candidates:
    """Candidates for all samples of the gradient, each once; `wanted` holds how often each class occurs, where that is known (C,).

    Every round begins at `start` (B,). After one without a new sample, `others` (m, B) are tried, then `starts` random
    starts a class and round; `attempts` such rounds end the search.
    """
    found = _nothing(equations)
    idle = 0
    while len(found) < equations.rank and idle <= attempts:
        span = peeled(equations, found.t, found.errors)
        here = span.lift.T @ start
        reached, score, upper = linear_scan(equations, span, here)
        classes = _classes_to_try(score, wanted, found, equations.rank - len(found), everything=idle > 0)
        if len(classes) == 0:
            idle += 1
            continue
        points, labels = reached[classes], classes
        if idle == 1:
            rows = others[: max(1, MOST_STARTS // len(classes))]
            labels = classes.repeat_interleave(len(rows))
            points = (rows @ span.lift).repeat(len(classes), 1)
        elif idle:
            each = max(1, min(starts, MOST_STARTS // len(classes)))
            labels = classes.repeat_interleave(each)
            points = points.repeat_interleave(each, 0) + _perturbations(equations, span, upper, here, len(labels), rng)
        t, value = solve(equations, span if idle % 3 == 2 else forgiving(equations, span), points, labels)
        new = _distinct(equations, _plausible(equations, candidates_at(equations, t @ span.lift.T, labels, value)), found, wanted)
        idle = 0 if len(new) else idle + 1
        found = _join(found, new)
    return found


def candidates_at(equations: Equations, t: Tensor, labels: Tensor, value: Tensor) -> Candidates:
    p = probabilities(equations, whole(equations), t)
    errors = weighed_errors(equations, p, labels) @ equations.spectrum.left
    return Candidates(t=t, labels=labels, errors=errors, value=value)


def _classes_to_try(score: Tensor, wanted: Tensor | None, found: Candidates, missing: int, *, everything: bool) -> Tensor:
    """The classes to solve for, likeliest first."""
    if wanted is not None:
        left = wanted - torch.bincount(found.labels, minlength=len(wanted))
        return left.clamp_min(0).nonzero()[:, 0]
    order = score.argsort()
    if everything:
        return order[: max(missing + 8, 16)]
    order = order[:missing]
    return order[score[order] < PLAUSIBLE]


def _perturbations(equations: Equations, span: Span, upper: Tensor, start: Tensor, count: int, rng: Generator) -> Tensor:
    """Random steps, longest where the linear scan leaves a class ambiguous, of a length between 3 and 100 % of the mean feature."""
    noise = torch.randn(len(upper), count, generator=rng, dtype=upper.dtype, device=upper.device)
    ridge = 1e-6 * torch.diag(torch.linalg.vector_norm(upper, dim=0))
    step = torch.linalg.solve_triangular(upper + ridge, noise, upper=True).T  # (count, r)
    length = torch.linalg.vector_norm(step @ span.lift.T * equations.spectrum.values, dim=1)
    size = torch.linalg.vector_norm(span.lift @ start * equations.spectrum.values)
    wanted = 10 ** (-1.5 * torch.rand(count, generator=rng, dtype=upper.dtype, device=upper.device))
    return step * (wanted * size / length)[:, None]


def _plausible(equations: Equations, candidates: Candidates) -> Candidates:
    """Those whose residual the noise explains and that carry about one sample's share of the gradient, best first."""
    p = probabilities(equations, whole(equations), candidates.t)
    size = weighed_errors(equations, p, candidates.labels).square().sum(1)
    noise = 10 * equation_variance(equations, candidates.t, p, candidates.errors).sum(1) / size
    share = (candidates.t * candidates.errors).sum(1) / (equations.rank * equations.temperature)
    good = (candidates.value < noise.clamp(GOOD, 1e-2)) & (share > 0.05) & (share < 20)
    kept = candidates[good.nonzero()[:, 0]]
    return kept[kept.value.argsort()]


def _distinct(equations: Equations, new: Candidates, found: Candidates, wanted: Tensor | None) -> Candidates:
    """Each solution once, no more of a class than are wanted, no more in all than the rank leaves room for.

    Two solutions of one sample give the same outer product, so a set is kept that is independent: each newcomer must be
    nearly orthogonal, in the sense of tᵢ·eⱼ = 0, to those before it.
    """
    if len(new) > 4 * equations.rank:
        new = new[torch.arange(4 * equations.rank, device=new.t.device)]
    cross = (new.t @ new.errors.T) / equations.rank  # (n, n)
    cross = cross.abs() / cross.diagonal().abs().clamp_min(1e-12)
    clash = torch.maximum(cross, cross.T) > 0.3
    features = new.t * equations.spectrum.values
    near = torch.cdist(features, features) < CLOSE * torch.linalg.vector_norm(features, dim=1)
    clash = (clash | (near & (new.labels[:, None] == new.labels))).tolist()
    left = None if wanted is None else (wanted - torch.bincount(found.labels, minlength=len(wanted))).tolist()
    kept: list[int] = []
    for i, label in enumerate(new.labels.tolist()):
        if len(found) + len(kept) >= equations.rank:
            break
        if any(clash[i][j] for j in kept) or (left is not None and left[label] <= 0):
            continue
        kept.append(i)
        if left is not None:
            left[label] -= 1
    return new[torch.tensor(kept, dtype=torch.long, device=new.t.device)]


def _nothing(equations: Equations) -> Candidates:
    empty = equations.basis.new_empty(0, equations.rank)
    return Candidates(t=empty, labels=torch.empty(0, dtype=torch.long, device=empty.device), errors=empty, value=empty[:, 0])


def _join(a: Candidates, b: Candidates) -> Candidates:
    return Candidates(
        t=torch.cat([a.t, b.t]),
        labels=torch.cat([a.labels, b.labels]),
        errors=torch.cat([a.errors, b.errors]),
        value=torch.cat([a.value, b.value]),
    )
