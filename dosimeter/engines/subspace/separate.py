"""From a head's gradient to its samples: search them one by one, polish, fit the whole batch where that helps, and certify."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.subspace.certificate import DEVIATIONS, LARGEST_MISFIT, Assessment, assess
from dosimeter.engines.subspace.equations import (
    Equations,
    mean_coordinates,
    peel,
    probabilities,
    project_off,
    row_coordinates,
    tolerant_span,
    weighted_errors,
    whole_span,
)
from dosimeter.engines.subspace.joint import fit_batch, guess_batch
from dosimeter.engines.subspace.rival_labels import label_margins
from dosimeter.engines.subspace.search import Candidates, candidates_at, missing_counts, search
from dosimeter.engines.subspace.single import linear_scan, polish, solve
from dosimeter.engines.subspace.verdict import (
    LARGEST_ERROR_BAR,
    SHARE_TOLERANCE,
    BatchFacts,
    Separation,
    Solutions,
    empty_separation,
    judge,
    label_blends,
    mass_of_one,
)

COARSE_ERROR_BAR = 1e-4  # error bar above which a joint fit is worth its time
LARGEST_JOINT = {"cpu": 64, "cuda": 128}  # rank up to which a batch is fitted jointly; the normal matrix has rank² rows
JOINT_MISFIT = 5.0  # the largest misfit of a joint fit that counts as a solution
JOINT_STARTS = 40  # most random starts of a joint fit
JOINT_WORK = 500_000  # bound on starts times cubed rank


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long the search goes on."""

    attempts: int = 4  # rounds of random starts without a new sample before the search ends
    starts: int = 8  # random starts a class in such a round
    quick: bool = False  # only what the first starts find, without a joint fit


def separate(
    equations: Equations,
    gradient: Tensor,
    bias_gradient: Tensor | None,
    facts: BatchFacts,
    rng: Generator,
    *,
    effort: Effort,
    counts: Tensor | None = None,
    known: Separation | None = None,
    begun: Separation | None = None,
) -> Separation:
    """The samples whose outer products add up to the gradient (C, H).

    `counts` (m,): the least number of times that each label occurs. `known`: an earlier result of other equations, whose certified
    samples are kept. `begun`: one of the same equations with less effort; its search goes on, and no solution is assessed again.
    """
    if equations.rank == 0 or is_saturated(equations, facts.batch_size):
        return empty_separation(equations)
    start = mean_coordinates(equations, gradient, bias_gradient)
    hint = counts
    if counts is None or int(counts.sum()) < equations.rank:
        expected = expected_counts(equations, start, bias_gradient)
        hint = expected if expected is not None and (counts is None or bool((expected >= counts).all())) else counts
    rows = row_coordinates(equations, gradient, bias_gradient, start)
    plan = _Plan(
        facts=facts,
        rows=rows,
        attempts=0 if effort.quick else effort.attempts,
        starts=effort.starts,
        jointly=not effort.quick and not equations.blends,
        found=None if known is None else _certified_candidates(equations, known),
    )
    best = _separate_with_counts(equations, start, hint, plan, rng, None if begun is None else begun.solutions)
    if effort.quick:
        return best
    wrong = 2 * int(best.certified.sum()) < equations.rank  # given labels may be wrong, and so may the hint
    if hint is not None and wrong and spare_equations(equations) >= 2:
        again = _separate_with_counts(equations, start, None, plan, rng)
        best = max(best, again, key=lambda result: int(result.certified.sum()))
    return best


def is_saturated(equations: Equations, batch_size: int | None) -> bool:
    """Whether every large enough batch could have this gradient, because its rank is full.

    A gradient of full rank C − 1 is still separable if the declared batch size is C − 1 and a bias gradient adds equations.
    """
    if equations.rank < min(equations.classes - 1, equations.weight.shape[1]):
        return False
    spare = equations.bias_target is not None and equations.rank < equations.weight.shape[1]
    return not (spare and equations.rank == batch_size)


def expected_counts(equations: Equations, start: Tensor, bias_gradient: Tensor | None) -> Tensor | None:
    """Counts from ∇b = mean(p) − counts/B with p at the mean feature: (C,). None unless all come out close to whole numbers.

    They are exact for heads that are not confident. A wrong count does no harm, because every sample is certified on its own.
    """
    if bias_gradient is None or not bool((bias_gradient > 0).any()) or equations.targets is not None or equations.blends:
        return None
    p = probabilities(equations, whole_span(equations), start[None])[0] - equations.even
    absent = bias_gradient > 0
    scale = bias_gradient[absent].sum() / p[absent].sum()
    counts = equations.rank * (p - bias_gradient / scale) / equations.share
    whole_numbers = counts.round()
    fits = bool(((counts - whole_numbers).abs() < 0.15).all()) and bool((whole_numbers >= 0).all())
    return whole_numbers.long() if fits and int(whole_numbers.sum()) == equations.rank else None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one pass over the gradient works with."""

    facts: BatchFacts
    rows: Tensor  # (C, B) coordinates of each class's row, as starts
    attempts: int
    starts: int
    jointly: bool  # whether a joint fit may follow
    found: Candidates | None  # samples known beforehand


def _certified_candidates(equations: Equations, known: Separation) -> Candidates:
    """The certified samples of an earlier result as candidates of the search."""
    t = known.features[known.certified] @ equations.spectrum.right.T / equations.spectrum.values
    labels = known.labels[known.certified]
    return candidates_at(equations, t, labels * (equations.classes + 1) if equations.blends else labels, torch.zeros_like(t[:, 0]))


def _separate_with_counts(
    equations: Equations, start: Tensor, counts: Tensor | None, plan: _Plan, rng: Generator, begun: Solutions | None = None
) -> Separation:
    attempts = plan.attempts if spare_equations(equations) >= 0 else -1
    found = search(
        equations,
        start,
        plan.rows,
        counts,
        rng,
        attempts=attempts,
        starts=plan.starts,
        free_scale=plan.facts.free_scale,
        non_negative=plan.facts.non_negative,
        found=plan.found if begun is None else begun.found,
    )
    solutions = _solutions(equations, found) if begun is None else begun.joined(_solutions(equations, found[len(begun.found) :]))
    keep = _distinct_solutions(equations, solutions)
    t, labels, single, trusted = solutions.t[keep], found.labels[keep], _select(solutions.single, keep), solutions.trusted[keep]
    result = judge(
        equations, t, labels, single.residual, single.error_bar, single.isolated, single.mass, single.mass_bar, trusted, plan.facts
    )
    if equations.blends:
        result = label_blends(equations, result, labels, single, plan.facts)
    result = replace(result, solutions=solutions)
    if not plan.jointly:
        return result
    fine = result.complete and bool((single.error_bar <= COARSE_ERROR_BAR).all())
    if fine or equations.rank > LARGEST_JOINT.get(t.device.type, 64):
        return result
    joint = _separate_jointly(equations, t, labels, single, trusted, start, counts, plan, rng)
    return result if joint is None or joint.certified.sum() < result.certified.sum() else joint


def _separate_jointly(
    equations: Equations,
    t: Tensor,
    labels: Tensor,
    single: Assessment,
    trusted: Tensor,
    start: Tensor,
    counts: Tensor | None,
    plan: _Plan,
    rng: Generator,
) -> Separation | None:
    """The whole batch fitted at once, with guesses for the samples still missing; None if no fit explains the gradient.

    This needs a batch of as many samples as the gradient has dimensions: each sample then has the same share.
    """
    mass = mass_of_one(equations, single.mass[trusted], plan.facts)
    if abs(mass / equations.temperature - equations.rank) > 0.5 and not plan.facts.free_scale:
        return None
    if plan.facts.free_scale and bool(((single.mass[trusted] / mass - 1).abs() > SHARE_TOLERANCE).any()):
        return None
    begin, labels = _complete_batch(equations, t, labels, single.errors, start, counts)
    starts = JOINT_STARTS if spare_equations(equations) < 2 else 2  # with equations to spare, the search finds most samples one by one
    for attempt in range(max(1, min(starts, JOINT_WORK // equations.rank**3))):
        if attempt or spare_equations(equations) < 0:
            if counts is not None and int(counts.sum()) >= equations.rank:
                labels = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)[: equations.rank]
            begin = guess_batch(equations, start, labels, mass, 0.1 + 0.1 * (attempt % 8), rng)
        joint = fit_batch(equations, begin, labels, mass, free_scale=plan.facts.free_scale)
        if joint.misfit <= JOINT_MISFIT and int((joint.error_bar < 1).sum()) > equations.rank // 2:
            break
    else:
        return None
    error = weighted_errors(equations, whole_span(equations), probabilities(equations, whole_span(equations), joint.t), labels)
    residual = torch.linalg.vector_norm(project_off(whole_span(equations), error), dim=1) / torch.linalg.vector_norm(error, dim=1)
    trusted = (joint.error_bar <= LARGEST_ERROR_BAR) & joint.isolated & (joint.label_margin >= DEVIATIONS)
    mass_each = torch.full_like(joint.error_bar, joint.mass)
    exactly = torch.zeros_like(mass_each)  # the fit assumes that every sample occurs once
    return judge(equations, joint.t, labels, residual, joint.error_bar, joint.isolated, mass_each, exactly, trusted, plan.facts)


def _solutions(equations: Equations, found: Candidates) -> Solutions:
    """Candidates polished and assessed, each by itself.

    A solution is trusted whose bars are small, whose residual the noise explains, and whose label fits better than every other label by
    `DEVIATIONS`.
    """
    t, inverse = polish(equations, whole_span(equations), found.t, found.labels)
    single = assess(equations, t, found.labels, inverse)
    trusted = (single.error_bar <= LARGEST_ERROR_BAR) & single.isolated & (single.misfit < LARGEST_MISFIT)
    trusted &= single.mass_bar <= SHARE_TOLERANCE * single.mass  # else the number of times that it occurs is unknown
    chosen = trusted.nonzero()[:, 0]
    sure = label_margins(equations, t[chosen], found.labels[chosen]) >= DEVIATIONS * single.misfit[chosen].clamp_min(1).sqrt()
    trusted = trusted.index_fill(0, chosen[~sure], False)
    if equations.blends:
        trusted &= single.second_bar <= LARGEST_ERROR_BAR / 2
        trusted &= (single.second_share >= -single.second_bar) & (single.second_share <= 1 + single.second_bar)
    return Solutions(found=found, t=t, single=single, trusted=trusted)


def spare_equations(equations: Equations) -> int:
    """The number of one sample's own equations, less the number of its unknowns."""
    return equations.classes - 1 - 2 * equations.rank - equations.blends


def _complete_batch(
    equations: Equations, t: Tensor, labels: Tensor, errors: Tensor, start: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Coordinates (B, B) and labels (B,): the samples found and, one after the other, a guess for each that is missing."""
    while len(t) < equations.rank:
        span = peel(equations, t, errors)
        scan = linear_scan(equations, span, span.lift.T @ start)
        score = scan.score
        if counts is not None and bool((left := missing_counts(counts, labels)).any()):
            score = torch.where(left > 0, score, torch.inf)
        label = score.argmin()[None]
        point, value = solve(equations, tolerant_span(equations, span), scan.reached[label], label)
        new = candidates_at(equations, point @ span.lift.T, label, value)
        t, labels, errors = torch.cat([t, new.t]), torch.cat([labels, label]), torch.cat([errors, new.errors])
    return t, labels


def _distinct_solutions(equations: Equations, solutions: Solutions) -> Tensor:
    """Indices of the solutions, without those that polishing moved onto an earlier solution of the same label."""
    features, labels = solutions.t * equations.spectrum.values, solutions.found.labels
    size = torch.linalg.vector_norm(features, dim=1)
    near = torch.cdist(features, features) < (solutions.single.error_bar.clamp(1e-6, 1e-3) * size)[:, None]
    if not equations.blends:  # a sample of one class solves the equations of every pair with that class
        near &= labels[:, None] == labels
    return torch.tril(near, -1).any(1).logical_not().nonzero()[:, 0]


def _select(assessment: Assessment, index: Tensor) -> Assessment:
    return Assessment(**{field.name: getattr(assessment, field.name)[index] for field in fields(assessment)})
