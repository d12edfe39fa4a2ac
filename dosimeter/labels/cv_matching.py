"""HFGInv's first stage: counts matched to the steadiest positions of the sorted gradient rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from dosimeter.head import find_head
from dosimeter.interfaces import LabelRecovery
from dosimeter.labels.auxiliary import reference_at
from dosimeter.labels.counting import counted, nearest_counts
from dosimeter.labels.one_hot_loss import require_sign_rule
from dosimeter.options import PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Exposure, Knowledge, LabelEstimate, Outcome


@LABELS.register("cv_matching")
@dataclass(frozen=True, kw_only=True)
class CVMatching(LabelRecovery):
    """Counts the classes with negative rows so that counts times the mean sorted feature match the sorted rows best.

    HFGInv (high-fidelity gradient inversion in distributed learning, AAAI 2024), Stage I, Eqs. (4)-(8): present are the
    classes whose row has a negative mean; auxiliary features, sorted, vary least at the `positions` of smallest
    coefficient of variation; there the counts v ≥ 1, Σ v = N, are to maximise the cosine of v h̄ᵀ and the sorted |rows|.
    `solver="evolution"` is the paper's (`population` 20, `generations` 200).
    Departure: `solver="exact"`, the default. The cosine is v·u / (‖v‖ ‖T‖) with u = T h̄ / ‖h̄‖, and a v of largest cosine
    is the whole vector nearest to c u for c = ‖v‖² / (v·u); so the nearest vectors for all c > 0, which change at
    finitely many c, hold the optimum, and all of them are walked through.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS, Knowledge.BATCH_SIZE, Knowledge.AUXILIARY})

    solver: Literal["exact", "evolution"] = "exact"
    positions: PositiveInt = 20
    population: PositiveInt = 20
    generations: PositiveInt = 200

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        head, size = find_head(exposure), exposure.public.batch_size
        assert head.weight_gradient is not None
        assert size is not None
        means = head.weight_gradient.double().mean(1)  # (C,)
        coarse = (-means).topk(min(size, len(means))).indices  # no more classes than samples
        coarse = coarse[means[coarse] < 0] if bool((means < 0).any()) else coarse[:1]  # (k,)
        steady, mean_feature = _steadiest(reference_at(exposure, head.name, "auxiliary", rng).features.double(), self.positions)
        rows = head.weight_gradient[coarse].double().abs().sort(1).values[:, steady]  # (k, M)
        pull = rows @ mean_feature / (mean_feature.norm() * rows.norm())  # (k,) u
        if self.solver == "exact":
            found = best_cosine_counts(pull, size)
        else:
            found = evolved_counts(pull, size, self.population, self.generations, rng)
        counts = torch.zeros(len(means), dtype=torch.long, device=means.device).index_copy(0, coarse, found)
        failed = not bool((means < 0).any())
        return counted(
            counts,
            scores=-means,
            outcome=Outcome.AMBIGUOUS if failed else Outcome.COMPLETED,
            message="no row of the head's gradient has a negative mean; the smallest is taken" if failed else "",
            details={"cosine": cosine(found, pull)},
        )


def cosine(counts: Tensor, pull: Tensor) -> Tensor:
    """1 − 𝒥 of Eq. (6): v·u / ‖v‖, for one or many v (..., k)."""
    counts = counts.to(pull.dtype)
    return (counts @ pull) / counts.norm(dim=-1)


def best_cosine_counts(pull: Tensor, total: int) -> Tensor:
    """The whole v ≥ 1 with Σ v = `total` of largest v·u / ‖v‖, exactly: (k,).

    The nearest vector to c u minimises ‖v‖² − 2c v·u, for each v a line in c; the nearest ones for all c are the lines of
    the lower envelope. Between two neighbouring lines there is another one iff it lies below their crossing point, so
    that asking at all crossings at once, round after round, finds the whole envelope. Only c near N / Σu matter: at the
    optimum ‖v − c u‖ = c √(‖u‖² − cos²), which bounds how far N = Σ v lies from c Σu.
    """
    least = torch.ones_like(pull)

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


def evolved_counts(pull: Tensor, total: int, population: int, generations: int, rng: Generator) -> Tensor:
    """The paper's evolution: crossover with threshold 1/2, one unit moved by mutation, the better of parent and child kept."""
    people = _rescaled(torch.rand(population, len(pull), generator=rng, device=rng.device).to(pull), total)
    for _ in range(generations):
        partners = people[torch.randint(population, (population,), generator=rng, device=rng.device)]
        keep = torch.rand(people.shape, generator=rng, device=rng.device) < 0.5
        children = _mutated(_rescaled(torch.where(keep, people, partners), total), rng)
        better = cosine(children, pull) > cosine(people, pull)
        people = torch.where(better[:, None], children, people)
    return people[cosine(people, pull).argmax()].long()


def _rescaled(people: Tensor, total: int) -> Tensor:
    """Rs: scaled to sum to the batch size, floored to at least one, the last entry making up the difference.

    Where the last entry cannot (it would fall below one), the nearest counts are taken: the paper does not say.
    """
    scaled = total * people / people.sum(1, keepdim=True)
    whole = scaled.floor().clamp_min(1)
    whole[:, -1] += total - whole.sum(1)
    short = whole[:, -1] < 1
    if bool(short.any()):
        whole[short] = nearest_counts(scaled[short], total, at_least=torch.ones_like(scaled[short])).to(whole)
    return whole


def _mutated(people: Tensor, rng: Generator) -> Tensor:
    """One unit from a random entry above one to another random entry."""
    draw = torch.rand((2, *people.shape), generator=rng, device=rng.device).to(people)
    giver = torch.where(people > 1, draw[0], -1).argmax(1, keepdim=True)
    taker = draw[1].scatter(1, giver, -1).argmax(1, keepdim=True)
    unit = (people.gather(1, giver) > 1).to(people) * (people.shape[1] > 1)
    return people.scatter_add(1, giver, -unit).scatter_add(1, taker, unit)


def _steadiest(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions of the sorted features with the smallest coefficient of variation, and their means (Eq. 5): (M,), (M,)."""
    ordered = features.sort(1).values  # (n, H)
    mean, deviation = ordered.mean(0), ordered.std(0, correction=0)
    variation = torch.where(mean > 0, deviation / mean.clamp_min(1e-300), torch.inf)
    steady = variation.argsort()[: min(count, len(mean))]
    return steady, mean[steady]
