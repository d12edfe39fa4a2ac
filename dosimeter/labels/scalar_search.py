"""One sample's gradient as a function of one unknown scalar, and two searches for that scalar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import softmax

Family = Literal["smoothing", "mixup", "one_hot"]

POINTS = 512  # of the grid, for each sign
SMALLEST = 1e-8  # error of the row r that the grid reaches down to
POLISHED = 12  # local minima of the grid that Newton polishes
POLISHINGS = 8
CHUNK = 2**21  # label entries held at once
SCALES: dict[Family, float] = {"smoothing": 4.0, "mixup": 2.0, "one_hot": 1.0}  # the released code's factor on the row
SWARM, FLIGHTS, WINDOWS = 500, 40, (10.0, 50.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class ScalarProblem:
    """∇W = (p − y) fᵀ / τ of one sample, seen from row r: f = g_r / s, with s = (p_r − y_r) / τ unknown (Eqs. 2-4)."""

    row: Tensor  # (H,) g_r
    ratios: Tensor  # (C,) (p_i − y_i) / (p_r − y_r)
    pull: Tensor  # (C,) W g_r
    bias: Tensor  # (C,)
    temperature: float
    family: Family
    precision: float  # rounding unit of the client's arithmetic
    noise: float  # relative distance of ∇W from rank one
    sign: int  # of s where non-negative features tell it, else 0

    def probabilities(self, errors: Tensor) -> Tensor:
        """p at each guess of s: (n,) -> (n, C)."""
        return softmax((self.pull / errors[:, None] + self.bias) / self.temperature, 1)

    def labels(self, errors: Tensor) -> Tensor:
        """ŷ at each guess of s (Eq. 4): (n,) -> (n, C)."""
        return self.probabilities(errors) - self.temperature * errors[:, None] * self.ratios


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Local solutions, the best first."""

    errors: Tensor  # (n,) s
    labels: Tensor  # (n, C)
    residuals: Tensor  # (n,) distance from the family's shape, relative to the gradient's
    floors: Tensor  # (n,) what rounding and noise alone would leave of it
    error_bars: Tensor  # (n,) what the noise may change in the label, L1


def grid_search(problem: ScalarProblem) -> Candidates:
    """Every guess of a logarithmic grid at once, then Gauss-Newton from the grid's local minima.

    The residual is relative, (ŷ off the family) / (s τ): the plain variance also vanishes as s → 0, where the softmax
    saturates and any label can be explained.
    """
    size = torch.logspace(0, math.log10(SMALLEST), POINTS, dtype=torch.float64, device=problem.pull.device) / problem.temperature
    errors = torch.stack([sign * size for sign in ((problem.sign,) if problem.sign else (1, -1))])  # (signs, POINTS)
    step = max(1, CHUNK // len(problem.pull))
    values = torch.cat([_distance(problem, part) for part in errors.flatten().split(step)]).reshape(errors.shape)
    lowest = _is_local_minimum(values)
    starts = torch.cat([errors[lowest][values[lowest].argsort()[:POLISHED]], _fitting(problem, errors, values)])
    errors, residuals, slopes = _polished(problem, starts)
    labels = problem.labels(errors)
    plausible = (labels.amin(1) > -1e-3) & (labels.amax(1) < 1 + 1e-3)
    order = torch.where(plausible, residuals, residuals + residuals.max() + 1).argsort()
    order = order[: max(1, int(plausible.sum()))]
    errors, labels, residuals = errors[order], labels[order], residuals[order]
    floors = _noise_floors(problem, errors, labels)
    bars = _error_bars(problem, errors, floors / slopes[order].clamp_min(1e-300))
    return Candidates(errors=errors, labels=labels, residuals=residuals, floors=floors, error_bars=bars)


def _fitting(problem: ScalarProblem, errors: Tensor, values: Tensor) -> Tensor:
    """A few of the grid's guesses that fit within the noise as they are: where there is a range of them, it shows."""
    guesses = errors[values <= 1e-6 * problem.ratios.square().sum()]
    distances = _distance(problem, guesses).clamp_min(0).sqrt()
    guesses = guesses[distances <= _noise_floors(problem, guesses, problem.labels(guesses))]
    return guesses[:: max(1, len(guesses) // POLISHED)]


def _is_local_minimum(values: Tensor) -> Tensor:
    """Lower than both neighbours, and by more than rounding than one of them: a plateau counts at its edge alone."""
    padded = torch.nn.functional.pad(values, (1, 1), value=torch.inf)
    left, right = padded[:, :-2], padded[:, 2:]
    return (values <= left) & (values <= right) & (values < (1 - 1e-6) * torch.maximum(left, right))


def _distance(problem: ScalarProblem, errors: Tensor) -> Tensor:
    """‖R‖² at each guess of s, for the grid: (n,) -> (n,)."""
    scale = (problem.temperature * errors)[:, None]
    logits = problem.pull / scale + problem.bias / problem.temperature
    shape = (softmax(logits, 1) / scale - problem.ratios) * scale.sign()
    rest = shape.scatter_(1, shape.topk(2 if problem.family == "mixup" else 1, dim=1).indices, 0)
    squares = rest.square().sum(1)
    if problem.family == "smoothing":
        squares = squares - rest.sum(1).square() / (rest.shape[1] - 1)
    return squares


def _residual(problem: ScalarProblem, errors: Tensor) -> tuple[Tensor, Tensor]:
    """R = ŷ/(s τ) without the entries that the family leaves free, and dR/d log|s|: (n, C) each.

    Smoothing leaves the largest entry free and wants the rest equal; one-hot wants the rest zero; mixup leaves two free
    and wants the rest zero.
    """
    scale = (problem.temperature * errors)[:, None]
    probabilities = problem.probabilities(errors)
    shape = probabilities / scale - problem.ratios
    free = (shape * scale.sign()).topk(2 if problem.family == "mixup" else 1, dim=1).indices
    kept = torch.ones_like(shape).scatter_(1, free, 0)
    growth = -problem.pull / scale
    change = probabilities * (growth - (probabilities * growth).sum(1, keepdim=True) - 1) / scale
    return _off_family(shape, kept, problem.family), _off_family(change, kept, problem.family)


def _off_family(entries: Tensor, kept: Tensor, family: Family) -> Tensor:
    if family == "smoothing":
        entries = entries - (entries * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
    return entries * kept


def _polished(problem: ScalarProblem, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gauss-Newton in log|s| from every start at once: (n,) s, residuals and slopes ‖dR/d log|s|‖."""
    best, lowest = errors, torch.full_like(errors, torch.inf)
    best_slope = torch.zeros_like(errors)
    for _ in range(POLISHINGS):
        residual, change = _residual(problem, errors)
        value, steepness = residual.norm(dim=1), change.norm(dim=1)
        better = value < lowest
        best, lowest = torch.where(better, errors, best), torch.where(better, value, lowest)
        best_slope = torch.where(better, steepness, best_slope)
        move = -(residual * change).sum(1) / steepness.square().clamp_min(1e-300)
        errors = errors * move.clamp(-0.05, 0.05).exp()
        errors = errors.sign() * errors.abs().clamp(0.1 * SMALLEST / problem.temperature, 1 / problem.temperature)
    return best, lowest, best_slope


def _noise_floors(problem: ScalarProblem, errors: Tensor, labels: Tensor) -> Tensor:
    """‖R‖ that a true s keeps: the client's rounding of logits, p and y, entry by entry, and what is not of rank one: (n,)."""
    logits = problem.pull / errors[:, None] + problem.bias
    sizes = problem.probabilities(errors) * (2 + 4 * logits.abs().amax(1, keepdim=True)) + labels.abs()
    free = labels.topk(2 if problem.family == "mixup" else 1, dim=1).indices
    spread = sizes.scatter(1, free, 0).norm(dim=1) * problem.precision / (problem.temperature * errors).abs()
    return spread + problem.noise * problem.ratios.scatter(0, problem.ratios.abs().argmax(), 0).norm()


def _error_bars(problem: ScalarProblem, errors: Tensor, shifts: Tensor) -> Tensor:
    """How far the label moves, L1, while log|s| moves by `shifts`: (n,)."""
    return (problem.labels(errors * shifts.clamp_max(0.5).exp()) - problem.labels(errors)).abs().sum(1)


def published_search(problem: ScalarProblem, column: Tensor, rng: Generator, iterations: int = 200) -> Candidates:
    """L-BFGS from +1 and −1, then a particle swarm over widening windows, one guess of λ at a time (Algorithms 1-2).

    `column` (C,) holds ∇W at the coordinate where |g_r| is largest, from which the paper reads the ratios.
    """
    scale = SCALES[problem.family]
    free = 2 if problem.family == "mixup" else 1

    def loss(guess: Tensor) -> Tensor:
        probabilities = softmax((guess * scale * problem.pull + problem.bias) / problem.temperature, 0)
        label = probabilities - problem.temperature * column / (guess * scale)
        return 1000 * label.sort().values[:-free].var(correction=0)

    guess, value = _descended(loss, iterations, problem.pull)
    if value >= 1e-9:
        flown, swarm_value = _flown(loss, rng, problem.pull)
        if swarm_value < value:
            guess, value = flown, swarm_value
    errors = 1 / (scale * guess)[None]
    unknown = torch.full_like(errors, torch.nan)
    residuals = torch.full_like(errors, value)
    return Candidates(errors=errors, labels=problem.labels(errors), residuals=residuals, floors=unknown, error_bars=unknown)


def _descended(loss: Callable[[Tensor], Tensor], iterations: int, like: Tensor) -> tuple[Tensor, float]:
    best, lowest = torch.ones((), dtype=like.dtype, device=like.device), float("inf")
    for start in (1.0, -1.0):
        guess = torch.full((), start, dtype=like.dtype, device=like.device, requires_grad=True)
        optimiser = torch.optim.LBFGS([guess], lr=0.5)

        def closure(guess: Tensor = guess, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            value = loss(guess)
            value.backward()
            return value

        with torch.enable_grad():
            for _ in range(iterations // 2):
                optimiser.step(closure)
                value = float(loss(guess.detach()))
                if not abs(float(guess.detach())) <= 100 or math.isnan(value):
                    break
                if value < lowest:
                    best, lowest = guess.detach().clone(), value
                if lowest < 1e-9:
                    return best, lowest
    return best, lowest


def _flown(loss: Callable[[Tensor], Tensor], rng: Generator, like: Tensor) -> tuple[Tensor, float]:
    """Particle swarm of one dimension: inertia .8, pulls .5 towards each particle's and the swarm's best."""

    def values(places: Tensor) -> Tensor:
        found = torch.stack([loss(place) for place in places])
        return torch.where(torch.isfinite(found), found, torch.inf)

    def draw() -> Tensor:
        return torch.rand(SWARM, generator=rng, device=rng.device).to(like)

    best, lowest = torch.ones((), dtype=like.dtype, device=like.device), float("inf")
    for window in WINDOWS:
        places, speeds = (2 * draw() - 1) * window, (2 * draw() - 1) * window
        own, own_values = places, values(places)
        for _ in range(FLIGHTS):
            leader = own[own_values.argmin()]
            speeds = 0.8 * speeds + 0.5 * draw() * (own - places) + 0.5 * draw() * (leader - places)
            places = (places + speeds).clamp(-window, window)
            found = values(places)
            own, own_values = torch.where(found < own_values, places, own), torch.minimum(found, own_values)
        if float(own_values.min()) < lowest:
            best, lowest = own[own_values.argmin()], float(own_values.min())
        if lowest < 1e-9:
            break
    return best, lowest
