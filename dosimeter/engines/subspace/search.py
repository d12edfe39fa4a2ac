"""Finds the samples of a gradient one by one: scan all classes, solve, peel off what is found, and repeat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.subspace.certificate import equation_variance
from dosimeter.engines.subspace.equations import (
    Equations,
    Span,
    main_classes,
    peel,
    probabilities,
    project_off,
    tolerant_span,
    weighted_errors,
    whole_span,
)
from dosimeter.engines.subspace.single import LARGEST_TENSOR, linear_scan, solve
from dosimeter.engines.subspace.successive_projection import extreme_starts, last_start

PLAUSIBLE_SCORE = 0.45  # linear residual above which a class is tried only if no better one is left
SAME_SOLUTION = 1e-3  # relative distance below which two solutions of one label count as one
FEWEST_STARTS, MOST_STARTS = 256, 512  # of one round
START_WORK = 2**25  # starts times classes times squared dimensions of one round
START_LENGTHS = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5)  # multiples of the mean feature that serve as starts
PAIRS_EACH = 4  # class pairs solved for, for each missing sample, where labels blend
STEPS_FROM_EXTREME_ROW = 15  # of Levenberg–Marquardt; an extreme row is close to its sample, or useless as a start
FIRST_RESIDUAL = 1e-12  # squared relative residual of a solution, if the noise does not raise it
LAST_RESIDUAL = 1e-6  # the same in the last round


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Solutions in the coordinates of the whole problem."""

    t: Tensor  # (n, B)
    labels: Tensor  # (n,)
    errors: Tensor  # (n, B) Uᵀ w∘d
    value: Tensor  # (n,) squared relative residual, in the span in which the solution was found

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, index: Tensor | slice) -> Candidates:
        return Candidates(t=self.t[index], labels=self.labels[index], errors=self.errors[index], value=self.value[index])


def search(
    equations: Equations,
    start: Tensor,
    rows: Tensor,
    wanted: Tensor | None,
    rng: Generator,
    *,
    attempts: int,
    starts: int,
    free_scale: bool = False,
    non_negative: bool = False,
    found: Candidates | None = None,
) -> Candidates:
    """Candidates for all samples of the gradient, each once, beyond those `found` already.

    First come the samples that extreme rows lead to. Then every round begins at `start` (B,). A round without a new sample is followed by
    one from `rows` (C, B), and then by rounds of `starts` random starts a class. After `attempts` such rounds without a new sample the
    search ends. `wanted` (m,) holds the least number of times that each label occurs, if it is known.
    """
    found = search_from_extreme_rows(equations, found, wanted, free_scale=free_scale, non_negative=non_negative)
    idle = 0
    while len(found) < equations.rank and idle <= attempts:
        span = peel(equations, found.t, found.errors)
        here = span.lift.T @ start
        scan = linear_scan(equations, span, here)
        score = torch.minimum(scan.score, _row_scores(equations, span, rows, scan.labels)) if idle == 1 else scan.score
        chosen = _labels_to_try(score, wanted, found, equations.rank - len(found), everything=idle > 0, blends=equations.blends)
        if len(chosen) == 0:
            idle += 1
            continue
        points, labels = scan.reached[chosen], scan.labels[chosen]
        most = _most_starts(equations, span)
        own = rows[main_classes(equations, labels)]
        if idle == 1:
            shared = torch.cat([_at_several_lengths(start), found.t, own])[: max(1, most // len(chosen))]
            labels = torch.cat([labels, labels.repeat_interleave(len(shared))])
            points = torch.cat([own, shared.repeat(len(chosen), 1)]) @ span.lift
        elif idle:
            each = max(1, min(starts, most // len(chosen)))
            labels = labels.repeat(2 * each)
            points = torch.cat([points.repeat(each, 1), (own @ span.lift).repeat(each, 1)])
            points = points + _perturbations(equations, span, scan.upper, here, len(labels), rng)
        t, value = solve(equations, span if idle % 3 == 2 else tolerant_span(equations, span), points, labels)
        solved = candidates_at(equations, t @ span.lift.T, labels, value)
        solved = _select_plausible(equations, solved, FIRST_RESIDUAL if idle < max(attempts, 1) else LAST_RESIDUAL, free_scale=free_scale)
        new = _select_distinct(equations, solved, found, wanted)
        idle = 0 if len(new) else idle + 1
        found = _concatenate(found, new)
    return found


def search_from_extreme_rows(
    equations: Equations,
    found: Candidates | None = None,
    wanted: Tensor | None = None,
    *,
    free_scale: bool = False,
    non_negative: bool = False,
) -> Candidates:
    """The samples `found`, and those that extreme rows lead to: solve, peel off, and repeat until no new sample comes."""
    found = _no_candidates(equations) if found is None else found
    while len(found) < equations.rank:
        span = peel(equations, found.t, found.errors)
        points, labels = extreme_starts(equations, span, found.t, found.errors, found.labels, non_negative=non_negative)
        if len(labels) == 0 and len(found) and len(found) == equations.rank - 1 and not equations.blends and equations.targets is None:
            points, labels = last_start(equations, span, found.t)
        if len(labels) == 0:
            return found
        t, value = solve(equations, tolerant_span(equations, span), points @ span.lift, labels, iterations=STEPS_FROM_EXTREME_ROW)
        solved = _select_plausible(
            equations, candidates_at(equations, t @ span.lift.T, labels, value), FIRST_RESIDUAL, free_scale=free_scale
        )
        new = _select_distinct(equations, solved, found, wanted)
        if len(new) == 0:
            return found
        found = _concatenate(found, new)
    return found


def _row_scores(equations: Equations, span: Span, rows: Tensor, labels: Tensor) -> Tensor:
    """The relative residual of each label at its class's row of the gradient: small where one sample dominates the row, (m,)."""
    scores = []
    for piece in labels.split(max(1, LARGEST_TENSOR.get(rows.device.type, 2**21) // equations.classes)):
        p = probabilities(equations, span, rows[main_classes(equations, piece)] @ span.lift)
        error = weighted_errors(equations, span, p, piece)
        scores.append(torch.linalg.vector_norm(project_off(span, error), dim=1) / torch.linalg.vector_norm(error, dim=1))
    return torch.cat(scores)


def _at_several_lengths(start: Tensor) -> Tensor:
    """The mean feature at several lengths: (n, B). If the features are nearly collinear, samples differ mainly in length."""
    return start * start.new_tensor(START_LENGTHS)[:, None]


def _most_starts(equations: Equations, span: Span) -> int:
    """The largest number of starts in one round."""
    each = equations.classes * span.logits.shape[1] ** 2
    return max(FEWEST_STARTS, min(MOST_STARTS, START_WORK // each))


def candidates_at(equations: Equations, t: Tensor, labels: Tensor, value: Tensor) -> Candidates:
    """Solutions with their error rows, from coordinates (n, B) and labels (n,)."""
    p = probabilities(equations, whole_span(equations), t)
    errors = weighted_errors(equations, whole_span(equations), p, labels) @ equations.spectrum.left
    return Candidates(t=t, labels=labels, errors=errors, value=value)


def _labels_to_try(score: Tensor, wanted: Tensor | None, found: Candidates, missing: int, *, everything: bool, blends: bool) -> Tensor:
    """Indices of the scanned labels to solve for: those still wanted and, for samples of unknown label, the likeliest."""
    order = score.argsort()
    known = order[:0]
    if wanted is not None:
        left = missing_counts(wanted, found.labels)
        known, missing = left.nonzero()[:, 0], missing - int(left.sum())
        order = order[(left == 0)[order]]
        if missing <= 0:
            return known
    if blends:  # pairs that share their larger class have similar scores
        missing = PAIRS_EACH * missing * (4 if everything else 1)
    if everything:
        return torch.cat([known, order[: max(missing + 8, 16)]])
    order = order[:missing]
    return torch.cat([known, order[score[order] < PLAUSIBLE_SCORE]])


def missing_counts(wanted: Tensor, labels: Tensor) -> Tensor:
    """How often each label is still to be found, after `labels`: (m,)."""
    return (wanted - torch.bincount(labels, minlength=len(wanted))).clamp_min(0)


def _perturbations(equations: Equations, span: Span, upper: Tensor, start: Tensor, count: int, rng: Generator) -> Tensor:
    """Random steps of 3 to 100 % of the mean feature's length, longest in the directions that the linear scan leaves ambiguous."""
    noise = torch.randn(len(upper), count, generator=rng, dtype=upper.dtype, device=upper.device)
    ridge = 1e-6 * torch.diag(torch.linalg.vector_norm(upper, dim=0))
    step = torch.linalg.solve_triangular(upper + ridge, noise, upper=True).T  # (count, r)
    length = torch.linalg.vector_norm(step @ span.lift.T * equations.spectrum.values, dim=1)
    size = torch.linalg.vector_norm(span.lift @ start * equations.spectrum.values)
    wanted = 10 ** (-1.5 * torch.rand(count, generator=rng, dtype=upper.dtype, device=upper.device))
    return step * (wanted * size / length)[:, None]


def _select_plausible(equations: Equations, candidates: Candidates, threshold: float, *, free_scale: bool) -> Candidates:
    """The candidates whose residual the noise explains and whose share of the gradient is about one sample, best first."""
    p = probabilities(equations, whole_span(equations), candidates.t)
    size = weighted_errors(equations, whole_span(equations), p, candidates.labels).square().sum(1)
    noise = 10 * equation_variance(equations, candidates.t, p, candidates.errors).sum(1) / size
    share = (candidates.t * candidates.errors).sum(1) / (equations.rank * equations.temperature)
    good = (candidates.value < noise.clamp(threshold, 1e-2)) & (share > 0 if free_scale else (share > 0.05) & (share < 20))
    kept = candidates[good.nonzero()[:, 0]]
    return kept[kept.value.argsort()]


def _select_distinct(equations: Equations, new: Candidates, found: Candidates, wanted: Tensor | None) -> Candidates:
    """Each new solution once, at most as many as the rank leaves room for; wanted labels keep their room.

    Two solutions of one sample give the same outer product. A new solution is therefore kept only if it is nearly orthogonal to those
    before it, in the sense of tᵢ·eⱼ = 0.
    """
    if len(new) > 4 * equations.rank:
        new = new[torch.arange(4 * equations.rank, device=new.t.device)]
    cross = (new.t @ new.errors.T) / equations.rank  # (n, n)
    cross = cross.abs() / cross.diagonal().abs().clamp_min(1e-12)
    clash = torch.maximum(cross, cross.T) > 0.3
    features = new.t * equations.spectrum.values
    near = torch.cdist(features, features) < SAME_SOLUTION * torch.linalg.vector_norm(features, dim=1)
    clash = (clash | (near & (new.labels[:, None] == new.labels))).tolist()
    left = [] if wanted is None else missing_counts(wanted, found.labels).tolist()
    free = equations.rank - len(found) - sum(left)  # room for samples of any label
    kept: list[int] = []
    for i, label in enumerate(new.labels.tolist()):
        if len(found) + len(kept) >= equations.rank:
            break
        asked_for = bool(left) and left[label] > 0
        if any(clash[i][j] for j in kept) or not (asked_for or free > 0):
            continue
        kept.append(i)
        if asked_for:
            left[label] -= 1
        else:
            free -= 1
    return new[torch.tensor(kept, dtype=torch.long, device=new.t.device)]


def _no_candidates(equations: Equations) -> Candidates:
    empty = equations.basis.new_empty(0, equations.rank)
    return Candidates(
        t=empty, labels=torch.empty(0, dtype=torch.long, device=empty.device), errors=empty, value=equations.basis.new_empty(0)
    )


def _concatenate(a: Candidates, b: Candidates) -> Candidates:
    return Candidates(
        t=torch.cat([a.t, b.t]),
        labels=torch.cat([a.labels, b.labels]),
        errors=torch.cat([a.errors, b.errors]),
        value=torch.cat([a.value, b.value]),
    )
