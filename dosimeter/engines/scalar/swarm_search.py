"""The published search for a single sample's scalar: L-BFGS, then a particle swarm, one guess at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import softmax

from dosimeter.engines.scalar.problem import Array, Candidates, Family, ScalarProblem

FOUND = 1e-9  # value of 1000 × the variance that counts as zero
DESCENTS, BOUND = 100, 100.0  # steps of L-BFGS for each sign, and the largest |λ| they may reach
SCALES: dict[Family, float] = {"smoothing": 4.0, "mixup": 2.0, "one_hot": 1.0}  # the released code's divisor of the row
SWARM, FLIGHTS, REACH = 500, 40, 70.0
WIDTHS: dict[Family, tuple[float, ...]] = {"smoothing": (5, 4, 20, 20), "mixup": (5, 10, 50), "one_hot": (5, 4, 20, 20)}  # of windows
RATE = 0.5  # of the descent
Objective = Callable[[Tensor], Tensor]
Optimiser = Literal["lbfgs_and_swarm", "lbfgs", "adam", "swarm"]
Target = Literal["variance", "zeros", "non_negative"]


@dataclass(frozen=True, kw_only=True)
class PublishedSearch:
    """How the published search minimises, and what. The paper's own swarm has 200 particles and 30 flights, the released one 500 and 40."""

    optimiser: Optimiser = "lbfgs_and_swarm"
    target: Target = "variance"
    particles: int = SWARM
    flights: int = FLIGHTS


def published_search(problem: ScalarProblem, pull: Array, column: Array, rng: Generator, settings: PublishedSearch) -> Candidates:
    """Soft-labels Algorithms 1 and 2 with the released code's constants: λ is what the row, divided by SCALES, is multiplied with.

    `pull` (C,) is W g_r. `column` (C,) holds ∇W_i / ∇W_r at the coordinate where |g_r| is largest: the paper takes the ratios from there.
    """
    scale = SCALES[problem.family]
    towards, bias, ratios = (torch.from_numpy(values) for values in (pull, problem.bias, column))
    distance = TARGETS[settings.target]

    def loss(guess: Tensor) -> Tensor:
        """Of one guess (), or of each of several (n, 1)."""
        probabilities = softmax((guess / scale * towards + bias) / problem.temperature, -1)
        label = probabilities - problem.temperature * scale / guess * ratios
        return 1000 * distance(label, problem.free)

    guess, value = torch.ones((), dtype=towards.dtype), math.inf
    if settings.optimiser != "swarm":
        guess, value = _descend(loss, towards, adam=settings.optimiser == "adam")
    if value >= FOUND and settings.optimiser in ("swarm", "lbfgs_and_swarm"):
        flown, swarm_value = _fly(loss, WIDTHS[problem.family], rng, towards, settings)
        if swarm_value < value:
            guess, value = flown, swarm_value
    errors = np.array([scale / float(guess)])
    unknown = np.full_like(errors, np.nan)
    return Candidates(
        errors=errors,
        labels=problem.labels(errors),
        residuals=np.full_like(errors, value),
        floors=unknown,
        spreads=unknown,
        blurs=unknown,
        error_bars=unknown,
    )


def _variance(label: Tensor, free: int) -> Tensor:
    """Eq. (5): the variance of all entries but the `free` largest."""
    return label.topk(label.shape[-1] - free, largest=False, sorted=False).values.var(-1, correction=0)


def _squares(label: Tensor, free: int) -> Tensor:
    """Appendix C, first: the mean square of all entries but the `free` largest."""
    return label.topk(label.shape[-1] - free, largest=False, sorted=False).values.square().mean(-1)


def _negative_mass(label: Tensor, free: int) -> Tensor:
    """Appendix C, second: Σ |ŷ_i| − 1, which is zero where no entry is negative."""
    return label.abs().sum(-1) - 1


TARGETS: dict[Target, Callable[[Tensor, int], Tensor]] = {"variance": _variance, "zeros": _squares, "non_negative": _negative_mass}


def _descend(loss: Objective, like: Tensor, *, adam: bool = False) -> tuple[Tensor, float]:
    """L-BFGS, or Adam, from +1, then from −1. On a plateau the guess jumps outwards, twice as far each time."""
    best, lowest = torch.ones((), dtype=like.dtype, device=like.device), float("inf")
    for start in (1.0, -1.0):
        guess = torch.full((), start, dtype=like.dtype, device=like.device, requires_grad=True)
        optimiser = torch.optim.Adam([guess], lr=RATE) if adam else torch.optim.LBFGS([guess], lr=RATE)

        def closure(guess: Tensor = guess, optimiser: torch.optim.Optimizer = optimiser) -> Tensor:
            optimiser.zero_grad()
            value = loss(guess)
            value.backward()
            return value

        recent, jump = [0.0, 0.0, 0.0], 0.5 * start
        with torch.enable_grad():
            for _ in range(DESCENTS):
                value = float(loss(guess.detach()))
                if not abs(float(guess.detach())) <= BOUND or math.isnan(value):
                    break
                if value < lowest:
                    best, lowest = guess.detach().clone(), value
                if lowest < FOUND:
                    return best, lowest
                recent = [*recent[1:], value]
                if max(recent) - min(recent) < sum(recent) / 3000:
                    guess.data += jump
                    jump *= 2
                    continue
                optimiser.step(closure)
    return best, lowest


def _fly(loss: Objective, widths: tuple[float, ...], rng: Generator, like: Tensor, settings: PublishedSearch) -> tuple[Tensor, float]:
    """A swarm in each window until one finds a zero. Inertia is .8; the pull to the particle's and to the swarm's best is .5."""

    def values(places: Tensor) -> Tensor:
        together = settings.optimiser == "swarm"
        found = loss(places[:, None]) if together else torch.stack([loss(place) for place in places])
        return torch.where(torch.isfinite(found), found, torch.inf)

    def draw() -> Tensor:
        return torch.rand(settings.particles, generator=rng, device=rng.device).to(like)

    best, lowest = torch.ones((), dtype=like.dtype, device=like.device), float("inf")
    for low, high in _windows(widths):
        places, speeds = low + (high - low) * draw(), (high - low) * (2 * draw() - 1)
        own, own_values = places, values(places)
        for _ in range(settings.flights):
            leader = own[own_values.argmin()]
            speeds = 0.8 * speeds + 0.5 * draw() * (own - places) + 0.5 * draw() * (leader - places)
            places = (places + speeds).clamp(low, high)
            found = values(places)
            own, own_values = torch.where(found < own_values, places, own), torch.minimum(found, own_values)
        if float(own_values.min()) < lowest:
            best, lowest = own[own_values.argmin()], float(own_values.min())
        if lowest < FOUND:
            break
    return best, lowest


def _windows(widths: tuple[float, ...]) -> Iterator[tuple[float, float]]:
    """Windows for each sign of λ, each farther from zero than the last, up to `REACH`."""
    low = 1.0
    for width in widths:
        high = low + width
        if high >= REACH:
            return
        yield low - 0.3, high
        yield -high - 0.3, -low
        low = high
