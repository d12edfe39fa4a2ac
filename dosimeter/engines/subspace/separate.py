"""From a head's gradient to its samples: search, refine one by one, fit jointly where that helps, and certify."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Generator, Tensor

from dosimeter.engines.subspace.certificate import LARGEST_MISFIT, Assessment, assess
from dosimeter.engines.subspace.equations import (
    Equations,
    forgiving,
    mean_coordinates,
    off_space,
    peeled,
    probabilities,
    row_coordinates,
    weighed_errors,
    whole,
)
from dosimeter.engines.subspace.joint import fit, guess
from dosimeter.engines.subspace.search import Candidates, candidates_at, search, still_wanted
from dosimeter.engines.subspace.single import linear_scan, polish, solve
from dosimeter.engines.subspace.verdict import (
    CERTIFIABLE,
    SHARE_TOLERANCE,
    Separation,
    Terms,
    judged,
    nothing_found,
    share_of_one,
    with_blends,
)

REFINE_ABOVE = 1e-4  # error bar above which the joint fit is worth its time
LARGEST_JOINT = {"cpu": 64, "cuda": 128}  # its normal matrix has rank² rows
JOINT_MISFIT = 5.0  # residual energy of a joint fit over what the noise explains, beyond which it is no solution
JOINT_STARTS = 40  # random starts of the joint fit at most, fewer where one is costly
JOINT_WORK = 500_000  # cube of the rank times starts


def separate(
    equations: Equations,
    gradient: Tensor,
    bias_gradient: Tensor | None,
    *,
    counts: Tensor | None = None,
    batch_size: int | None = None,
    free_scale: bool = False,
    non_negative: bool = False,
    rng: Generator,
    attempts: int = 4,
    starts: int = 8,
    quick: bool = False,
    known: Separation | None = None,
) -> Separation:
    """Take the gradient apart.

    counts: (m,) how often each label occurs at least, where that is known; batch_size: where it is declared; free_scale: the
    client may have scaled the gradient, as clipping does; non_negative: the features follow a ReLU; quick: only what the first
    starts find, one by one; known: an earlier result, whose certified samples of one class are not looked for again.
    """
    if equations.rank == 0 or saturated(equations, batch_size):
        return nothing_found(equations)
    start = mean_coordinates(equations, gradient, bias_gradient)
    hint = counts
    if counts is None or int(counts.sum()) < equations.rank:
        expected = expected_counts(equations, start, bias_gradient)
        hint = expected if expected is not None and (counts is None or bool((expected >= counts).all())) else counts
    rows = row_coordinates(equations, gradient, bias_gradient, start)
    plan = _Plan(
        terms=Terms(batch_size=batch_size, free_scale=free_scale, non_negative=non_negative),
        rows=rows,
        attempts=0 if quick else attempts,
        starts=starts,
        jointly=not quick and not equations.blends,
        found=None if known is None else _candidates(equations, known),
    )
    best = _separate(equations, start, hint, plan, rng)
    if quick:
        return best
    wrong = 2 * int(best.certified.sum()) < equations.rank  # labels given may be wrong, and so may a hint be
    if hint is not None and wrong and determined(equations) >= 2:
        again = _separate(equations, start, None, plan, rng)
        best = max(best, again, key=lambda result: int(result.certified.sum()))
    return best


def saturated(equations: Equations, batch_size: int | None) -> bool:
    """Whether any batch that is large enough could have this gradient.

    Of full rank C − 1 it still holds exactly as many samples where that is declared and a bias gives the equations that lack.
    """
    if equations.rank < min(equations.classes - 1, equations.weight.shape[1]):
        return False
    spare = equations.bias_target is not None and equations.rank < equations.weight.shape[1]
    return not (spare and equations.rank == batch_size)


def expected_counts(equations: Equations, start: Tensor, bias_gradient: Tensor | None) -> Tensor | None:
    """Counts from ∇b = mean(p) − counts/B with p at the mean feature, where they come out as whole numbers: (C,).

    Exact enough for heads that are not confident yet; only a hint, since every sample is proved on its own.
    """
    if bias_gradient is None or not bool((bias_gradient > 0).any()) or equations.targets is not None or equations.blends:
        return None
    p = probabilities(equations, whole(equations), start[None])[0] - equations.even
    absent = bias_gradient > 0
    scale = bias_gradient[absent].sum() / p[absent].sum()
    counts = equations.rank * (p - bias_gradient / scale) / equations.share
    whole_numbers = counts.round()
    fits = bool(((counts - whole_numbers).abs() < 0.15).all()) and bool((whole_numbers >= 0).all())
    return whole_numbers.long() if fits and int(whole_numbers.sum()) == equations.rank else None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    terms: Terms
    rows: Tensor  # (C, B)
    attempts: int
    starts: int
    jointly: bool
    found: Candidates | None


def _candidates(equations: Equations, known: Separation) -> Candidates:
    """The certified samples of an earlier result, as the search has them."""
    t = known.features[known.certified] @ equations.spectrum.right.T / equations.spectrum.values
    labels = known.labels[known.certified]
    return candidates_at(equations, t, labels * (equations.classes + 1) if equations.blends else labels, torch.zeros_like(t[:, 0]))


def _separate(equations: Equations, start: Tensor, counts: Tensor | None, plan: _Plan, rng: Generator) -> Separation:
    attempts = plan.attempts if determined(equations) >= 0 else -1
    found = search(
        equations,
        start,
        plan.rows,
        counts,
        rng,
        attempts=attempts,
        starts=plan.starts,
        free_scale=plan.terms.free_scale,
        non_negative=plan.terms.non_negative,
        found=plan.found,
    )
    t, inverse = polish(equations, whole(equations), found.t, found.labels)
    labels, single = found.labels, assess(equations, t, found.labels, inverse)
    keep = _once(equations, t, labels, single)
    t, labels, single = t[keep], labels[keep], _pick(single, keep)
    trusted = (single.error_bar <= CERTIFIABLE) & single.isolated & (single.misfit < LARGEST_MISFIT)
    trusted &= single.mass_bar <= SHARE_TOLERANCE * single.mass  # else nobody can tell how often it occurs
    if equations.blends:
        trusted &= single.second_bar <= CERTIFIABLE / 2
        trusted &= (single.second_share >= -single.second_bar) & (single.second_share <= 1 + single.second_bar)
    result = judged(
        equations, t, labels, single.residual, single.error_bar, single.isolated, single.mass, single.mass_bar, trusted, plan.terms
    )
    if equations.blends:
        result = with_blends(equations, result, labels, single, plan.terms)
    if not plan.jointly:
        return result
    fine = result.complete and bool((single.error_bar <= REFINE_ABOVE).all())
    if fine or equations.rank > LARGEST_JOINT.get(t.device.type, 64):
        return result
    joint = _jointly(equations, t, labels, single, trusted, start, counts, plan, rng)
    return result if joint is None or joint.certified.sum() < result.certified.sum() else joint


def _jointly(
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
    """The whole batch refined at once, missing samples begun as guesses; None where that does not explain the gradient.

    Only where the batch has as many samples as the gradient has dimensions: then each takes the same share.
    """
    mass = share_of_one(equations, single.mass[trusted], plan.terms)
    if abs(mass / equations.temperature - equations.rank) > 0.5 and not plan.terms.free_scale:
        return None
    if plan.terms.free_scale and bool(((single.mass[trusted] / mass - 1).abs() > SHARE_TOLERANCE).any()):
        return None
    begin, labels = _completed(equations, t, labels, single.errors, start, counts)
    starts = JOINT_STARTS if determined(equations) < 2 else 2  # samples that are determined alone would mostly have been found
    for attempt in range(max(1, min(starts, JOINT_WORK // equations.rank**3))):
        if attempt or determined(equations) < 0:
            if counts is not None and int(counts.sum()) >= equations.rank:
                labels = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)[: equations.rank]
            begin = guess(equations, start, labels, mass, 0.1 + 0.1 * (attempt % 8), rng)
        joint = fit(equations, begin, labels, mass, free_scale=plan.terms.free_scale)
        if joint.misfit <= JOINT_MISFIT and int((joint.error_bar < 1).sum()) > equations.rank // 2:
            break
    else:
        return None
    error = weighed_errors(equations, whole(equations), probabilities(equations, whole(equations), joint.t), labels)
    residual = torch.linalg.vector_norm(off_space(whole(equations), error), dim=1) / torch.linalg.vector_norm(error, dim=1)
    trusted = (joint.error_bar <= CERTIFIABLE) & joint.isolated
    mass_each = torch.full_like(joint.error_bar, joint.mass)
    exactly = torch.zeros_like(mass_each)  # by assumption all masses are one
    return judged(equations, joint.t, labels, residual, joint.error_bar, joint.isolated, mass_each, exactly, trusted, plan.terms)


def determined(equations: Equations) -> int:
    """By how many equations one sample's own equations outnumber its unknowns."""
    return equations.classes - 1 - 2 * equations.rank - equations.blends


def _completed(
    equations: Equations, t: Tensor, labels: Tensor, errors: Tensor, start: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Guesses added, one at a time and each peeled off, until there are as many samples as dimensions."""
    while len(t) < equations.rank:
        span = peeled(equations, t, errors)
        scan = linear_scan(equations, span, span.lift.T @ start)
        score = scan.score
        if counts is not None and bool((left := still_wanted(counts, labels)).any()):
            score = torch.where(left > 0, score, torch.inf)
        label = score.argmin()[None]
        guess, value = solve(equations, forgiving(equations, span), scan.reached[label], label)
        new = candidates_at(equations, guess @ span.lift.T, label, value)
        t, labels, errors = torch.cat([t, new.t]), torch.cat([labels, label]), torch.cat([errors, new.errors])
    return t, labels


def _once(equations: Equations, t: Tensor, labels: Tensor, single: Assessment) -> Tensor:
    """Indices that leave out what polishing in the whole space led to an earlier solution of the same label."""
    features = t * equations.spectrum.values
    size = torch.linalg.vector_norm(features, dim=1)
    near = torch.cdist(features, features) < (single.error_bar.clamp(1e-6, 1e-3) * size)[:, None]
    if not equations.blends:  # a sample of one class solves the equations of any pair with it
        near &= labels[:, None] == labels
    return torch.tril(near, -1).any(1).logical_not().nonzero()[:, 0]


def _pick(assessment: Assessment, index: Tensor) -> Assessment:
    return Assessment(**{field.name: getattr(assessment, field.name)[index] for field in fields(assessment)})
