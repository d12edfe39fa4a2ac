"""The published search for a single sample's scalar: L-BFGS, then a particle swarm, one guess at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
Objective = Callable[[Tensor], Tensor]


def published_search(problem: ScalarProblem, column: Array, rng: Generator) -> Candidates:
    """Soft-labels Algorithms 1 and 2 with the released code's constants: λ is what the row, divided by SCALES, is multiplied with.

    `column` (C,) holds ∇W_i / ∇W_r at the coordinate where |g_r| is largest: the paper takes the ratios from there.
    """
    scale = SCALES[problem.family]
    pull, bias, ratios = (torch.from_numpy(values) for values in (problem.pull, problem.bias, column))

    def loss(guess: Tensor) -> Tensor:
        probabilities = softmax((guess / scale * pull + bias) / problem.temperature, 0)
        label = probabilities - problem.temperature * scale / guess * ratios
        return 1000 * label.topk(len(label) - problem.free, largest=False, sorted=False).values.var(correction=0)

    guess, value = _descend(loss, pull)
    if value >= FOUND:
        flown, swarm_value = _fly(loss, WIDTHS[problem.family], rng, pull)
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


def _descend(loss: Objective, like: Tensor) -> tuple[Tensor, float]:
    """L-BFGS from +1, then from −1. On a plateau the guess jumps outwards, twice as far each time."""
    best, lowest = torch.ones((), dtype=like.dtype, device=like.device), float("inf")
    for start in (1.0, -1.0):
        guess = torch.full((), start, dtype=like.dtype, device=like.device, requires_grad=True)
        optimiser = torch.optim.LBFGS([guess], lr=0.5)

        def closure(guess: Tensor = guess, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
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


def _fly(loss: Objective, widths: tuple[float, ...], rng: Generator, like: Tensor) -> tuple[Tensor, float]:
    """A swarm in each window until one finds a zero. Inertia is .8; the pull to the particle's and to the swarm's best is .5."""

    def values(places: Tensor) -> Tensor:
        found = torch.stack([loss(place) for place in places])
        return torch.where(torch.isfinite(found), found, torch.inf)

    def draw() -> Tensor:
        return torch.rand(SWARM, generator=rng, device=rng.device).to(like)

    best, lowest = torch.ones((), dtype=like.dtype, device=like.device), float("inf")
    for low, high in _windows(widths):
        places, speeds = low + (high - low) * draw(), (high - low) * (2 * draw() - 1)
        own, own_values = places, values(places)
        for _ in range(FLIGHTS):
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
