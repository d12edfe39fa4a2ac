"""HFGInv's first stage: counts matched to the steadiest positions of the sorted gradient rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from dosimeter.client.training import FedSGD
from dosimeter.engines.counting.auxiliary import reference_at
from dosimeter.engines.counting.bounds import Bounds, bounds
from dosimeter.engines.counting.consistency import refutation_of_batch
from dosimeter.engines.counting.counts import estimate_of, nearest_counts, nothing_to_read
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.engines.premises import premises_of
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.options import PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Outcome

PREMISES = ("every sample has one label", "no feature is negative where random inputs give none")


@LABELS.register("cv_matching")
@dataclass(frozen=True, kw_only=True)
class CVMatching(LabelRecovery):
    """Counts the classes with negative rows so that counts times the mean sorted feature match the sorted rows best.

    HFGInv (high-fidelity gradient inversion in distributed learning, AAAI 2024), Stage I, Eqs. (4)-(8). Classes whose row has a
    negative mean are present. At the `positions` where sorted auxiliary features vary least, the counts v ≥ 1, Σ v = N, maximise the
    cosine of v h̄ᵀ and the sorted |rows|. `solver="evolution"` is the paper's search.
    Departures: `solver="exact"` finds the best counts. Both keep lower bounds (`bounds.py`), since the best cosine is often wrong;
    `bounded=False` keeps v ≥ 1.
    `certified`: signs prove every count, and nothing in the update refutes that it is one batch's gradient. `confidence`: the share
    of samples whose class proved bounds tell.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS, Knowledge.BATCH_SIZE, Knowledge.AUXILIARY})

    solver: Literal["exact", "evolution"] = "exact"
    positions: PositiveInt = 20
    population: PositiveInt = 20
    generations: PositiveInt = 200
    bounded: bool = True

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        head, public = find_head(exposure), exposure.public
        size = public.batch_size
        assert head.weight_gradient is not None
        assert size is not None
        if not bool(head.weight_gradient.any()):
            return nothing_to_read(head.weight_gradient, size)
        means = head.weight_gradient.double().mean(1)  # (C,)
        features = reference_at(exposure, head.name, "auxiliary", rng).features.double()
        known = Bounds(least=torch.zeros_like(means), proved=False)
        if self.bounded:
            known = bounds(exposure, head, features, rng, method=self.name)
        coarse, failed = _coarse(means, known.least, size)  # (k,)
        steady, mean_feature = _steadiest(features, self.positions)
        rows = head.weight_gradient[coarse].double().abs().sort(1).values[:, steady]  # (k, M)
        pull = rows @ mean_feature / (mean_feature.norm() * rows.norm())  # (k,) u
        at_least = known.least[coarse].clamp_min(1)
        if self.solver == "exact":
            found = best_cosine_counts(pull, size, at_least)
        else:
            found = evolved_counts(pull, size, at_least, self.population, self.generations, rng)
        counts = torch.zeros(len(means), dtype=torch.long, device=means.device).index_copy(0, coarse, found)
        certified = known.proved and known.leave(size) == 0 and isinstance(public.training, FedSGD) and not public.defenses
        refuted = refutation_of_batch(head, size, public.loss, rng) if certified else ""
        message = "no row of the head's gradient has a negative mean; the smallest is taken" if failed else refuted
        return estimate_of(
            counts,
            scores=-means,
            certified=certified and not refuted,
            premises=(*premises_of(public), *PREMISES) if certified and not refuted else (),
            confidence=1 - known.leave(size) / size if known.proved else None,
            outcome=Outcome.AMBIGUOUS if failed else Outcome.COMPLETED,
            message=message,
            details={"cosine": cosine(found, pull)},
        )


def _coarse(means: Tensor, least: Tensor, size: int) -> tuple[Tensor, bool]:
    """The classes taken for present, and whether the rule found none: those with a bound, then those with negative means (Eq. 3).

    No more classes than the samples that the bounds leave over.
    """
    bounded = torch.nonzero(least > 0).flatten()
    candidates = torch.where(least > 0, torch.inf, means)
    more = (-candidates).topk(min(size - int(least.sum()), len(means))).indices
    more = more[candidates[more] < 0]
    coarse = torch.cat([bounded, more]).sort().values  # in class order: the evolution's start gives the last rows what is left over
    return (coarse, False) if len(coarse) else (means.argmin()[None], True)


def cosine(counts: Tensor, pull: Tensor) -> Tensor:
    """1 − 𝒥 of Eq. (6): v·u / ‖v‖, for one or many v (..., k)."""
    counts = counts.to(pull.dtype)
    return (counts @ pull) / counts.norm(dim=-1)


def best_cosine_counts(pull: Tensor, total: int, least: Tensor) -> Tensor:
    """The whole v ≥ `least` (k,) with Σ v = `total` of largest v·u / ‖v‖, exactly: (k,).

    The nearest vector to c u minimises ‖v‖² − 2c v·u, for each v a line in c; the nearest ones for all c are the lines of
    the lower envelope. Between two neighbouring lines there is another one iff it lies below their crossing point, so
    that asking at all crossings at once, round after round, finds the whole envelope. Only c near N / Σu matter: at the
    optimum ‖v − c u‖ = c √(‖u‖² − cos²), which bounds how far N = Σ v lies from c Σu.
    """

    def nearest(scales: Tensor) -> Tensor:
        return nearest_counts(scales[:, None] * pull, total, at_least=least)

    tiny = torch.finfo(pull.dtype).tiny
    middle = total / pull.sum().clamp_min(tiny)
    attained = cosine(nearest(middle[None]), pull)[0]
    slack = (len(pull) * (pull.square().sum() - attained**2).clamp_min(0)).sqrt()
    steepest = 4 * total**2 / pull.max().clamp_min(tiny)
    last = torch.where(pull.sum() > slack, total / (pull.sum() - slack).clamp_min(tiny), steepest).clamp_max(steepest)
    lines = _distinct(nearest(torch.stack([total / (pull.sum() + slack).clamp_min(tiny), middle, last])), pull)
    while True:
        slopes, heights = lines.double() @ pull, lines.double().square().sum(1)
        crossings = (heights[1:] - heights[:-1]) / (2 * (slopes[1:] - slopes[:-1]))
        between = nearest(crossings)
        crossed = _line(lines[1:], pull, crossings)
        below = _line(between, pull, crossings) < crossed - 1e-10 * crossed.abs()
        more = _distinct(torch.cat([lines, between[below]]), pull)
        if len(more) == len(lines):
            candidates = torch.cat([lines, between])
            return candidates[cosine(candidates, pull).argmax()]
        lines = more


def _line(counts: Tensor, pull: Tensor, scales: Tensor) -> Tensor:
    counts = counts.to(pull.dtype)
    return counts.square().sum(1) - 2 * scales * (counts @ pull)


def _distinct(lines: Tensor, pull: Tensor) -> Tensor:
    """Ordered by slope v·u, the lowest line where several share a slope."""
    lines = torch.unique(lines, dim=0)
    slopes, heights = lines.double() @ pull, lines.double().square().sum(1)
    order = heights.argsort(stable=True)
    order = order[slopes[order].argsort(stable=True)]
    lines, slopes = lines[order], slopes[order]
    new = torch.ones_like(slopes, dtype=torch.bool)
    new[1:] = slopes[1:] - slopes[:-1] > 1e-12 * slopes.abs().max()
    return lines[new]


def evolved_counts(pull: Tensor, total: int, least: Tensor, population: int, generations: int, rng: Generator) -> Tensor:
    """The paper's evolution: crossover with threshold 1/2, one unit moved by mutation, the better of parent and child kept."""
    people = _rescale(torch.rand(population, len(pull), generator=rng, device=rng.device).to(pull), total, least)
    for _ in range(generations):
        partners = people[torch.randint(population, (population,), generator=rng, device=rng.device)]
        keep = torch.rand(people.shape, generator=rng, device=rng.device) < 0.5
        children = _mutate(_rescale(torch.where(keep, people, partners), total, least), least, rng)
        better = cosine(children, pull) > cosine(people, pull)
        people = torch.where(better[:, None], children, people)
    return people[cosine(people, pull).argmax()].long()


def _rescale(people: Tensor, total: int, least: Tensor) -> Tensor:
    """Rs: scaled to sum to the batch size, floored to at least one (or `least`), the last entry making up the difference.

    Where the last entry cannot (it would fall below its least), the nearest counts are taken: the paper does not say.
    """
    scaled = total * people / people.sum(1, keepdim=True)
    whole = torch.maximum(scaled.floor(), least)
    whole[:, -1] += total - whole.sum(1)
    short = whole[:, -1] < least[-1]
    if bool(short.any()):
        whole[short] = nearest_counts(scaled[short], total, at_least=least.expand_as(scaled[short])).to(whole)
    return whole


def _mutate(people: Tensor, least: Tensor, rng: Generator) -> Tensor:
    """One unit from a random entry above its least to another random entry."""
    draw = torch.rand((2, *people.shape), generator=rng, device=rng.device).to(people)
    giver = torch.where(people > least, draw[0], -1).argmax(1, keepdim=True)
    taker = draw[1].scatter(1, giver, -1).argmax(1, keepdim=True)
    unit = (people > least).gather(1, giver).to(people) * (people.shape[1] > 1)
    return people.scatter_add(1, giver, -unit).scatter_add(1, taker, unit)


def _steadiest(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions of the sorted features with the smallest coefficient of variation, and their means (Eq. 5): (M,), (M,)."""
    ordered = features.sort(1).values  # (n, H)
    mean, deviation = ordered.mean(0), ordered.std(0, correction=0)
    variation = torch.where(mean > 0, deviation / mean.clamp_min(1e-300), torch.inf)
    steady = variation.argsort()[: min(count, len(mean))]
    return steady, mean[steady]
