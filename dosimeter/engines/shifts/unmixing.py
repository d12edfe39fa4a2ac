"""Samples out of their mixtures: maps behind a ReLU are non-negative and mostly zero, and no mixture of them is.

B mixtures of B maps span a space of dimension B. A vector c of that space is a sample's direction where Q c is non-negative and zero on
many rows. Those directions are the edges of the cone {c : Q c ≥ 0}: linear programs in B variables lead to them, one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

Array = NDArray[np.float64]

ZERO_NOISES = 30.0  # an entry counts as zero within as many standard deviations
NEGATIVE_NOISES = 50.0  # an entry below zero by more refutes a direction
LEAST_ZEROS = 4  # zeros for each sample of the batch, at least: a wrong edge has one less than there are samples
LEAST_WITNESSES = 12  # zeros that fix a direction where it is weakest, beyond the B − 1 that fix any edge, and beyond chance
HINGE = 0.9  # leverage of a zero that alone fixes a direction: a mixture of m samples always has m − 1 such zeros
TIGHT_NOISES = 5.0  # a witness is zero within as many standard deviations
CHANCE_SLACK = 2.0  # witnesses that chance explains, over the entries in a band of the same width farther from zero
VISIBLE_NOISES = 100.0  # rows smaller than as many standard deviations say nothing
LEAST_NOISE = 3e-7  # of an entry: a few units of single precision
ERROR_SLACK = 4.0  # the errors are an estimate, and larger where entries are large
SHARPENINGS = 6  # rounds of weighing anew
AWAY = 0.5  # of a random objective that is added at most to the one that is zero at the samples found
POLISHES = 5
CLOSE = 0.35  # share of the entries whose sum is the next objective
ROUNDS = 40  # of adding the rows that a linear program's answer violates
MOST_ROWS = 3000  # in a linear program
ROWS_KEPT = 1500


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples found in a mixture, each up to a positive factor."""

    mixing: Tensor  # (m, B) how each sample is made of the mixtures
    zeros: Tensor  # (m,) entries of each that are zero to the noise
    witnesses: Tensor  # (m,) zeros that fix the direction where it is weakest
    certain: Tensor  # (m,) bool: enough of both, and nowhere negative
    errors: Tensor  # (m,) of each direction where it is weakest, relative
    doubtful: tuple[int, float] | None = None  # witnesses of the clearest direction that was left out for too few, and how many it takes


def unmix(mixtures: Tensor, errors: Tensor, seed: int = 0) -> Samples:
    """(B, entries) mixtures of non-negative sparse maps, with an estimate of their errors, -> how each map is mixed of them."""
    samples, entries = mixtures.shape
    orthonormal, triangle = np.linalg.qr(mixtures.cpu().numpy().T)  # (entries, B), (B, B)
    back = np.linalg.inv(triangle / np.sqrt(entries))  # (B, B)
    mixed = _Mixed(rows=orthonormal * np.sqrt(entries), errors=errors.cpu().numpy().T @ back)
    search = None if samples == 1 else _Search(mixed, np.random.default_rng(seed))
    directions = [np.sign(mixed.rows.sum(0))] if search is None else search.edges()
    found = [mixed.describe(direction) for direction in directions]
    return Samples(
        mixing=torch.from_numpy(np.array(directions).reshape(-1, samples) @ back.T).to(mixtures),
        zeros=torch.tensor([one.zeros for one in found], dtype=torch.int64),
        witnesses=torch.tensor([one.witnesses for one in found], dtype=torch.int64),
        certain=torch.tensor([one.certain for one in found], dtype=torch.bool),
        errors=torch.tensor([one.error for one in found], dtype=torch.float64),
        doubtful=None if search is None or search.doubtful is None else (search.doubtful.witnesses, search.doubtful.wanted),
    )


def one_sample(mixture: Tensor) -> Samples:
    """A single map (1, entries), which nothing is mixed with; its factor, and with it its sign, is left to the scales."""
    none = torch.zeros(1, dtype=torch.int64)
    sure, error = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.float64)
    return Samples(mixing=torch.ones(1, 1).to(mixture), zeros=none, witnesses=none, certain=sure, errors=error)


@dataclass(frozen=True, kw_only=True)
class _Direction:
    """What the entries Q c of one direction say."""

    zeros: int
    witnesses: int  # zeros that speak where the others say least
    certain: bool
    error: float = 0.0  # by which the direction may be off there, relative
    wanted: float = 0.0  # witnesses that it takes; 0 where more of them would not help


@dataclass(frozen=True, kw_only=True)
class _Mixed:
    """The mixtures' space: Q, whose rows are entries, scaled so that Q c has a root mean square of 1 for unit c, and its errors."""

    rows: Array  # (entries, B)
    errors: Array  # (entries, B)

    def noise(self, direction: Array) -> float:
        """The standard deviation of an entry of Q c."""
        return float(np.hypot(ERROR_SLACK * np.sqrt(np.mean((self.errors @ direction) ** 2)), LEAST_NOISE))

    def describe(self, direction: Array) -> _Direction:
        heights, noise, samples = self.rows @ direction, self.noise(direction), len(direction)
        zero = self.rows[np.abs(heights) < ZERO_NOISES * noise]
        fair = float(heights.min()) >= -NEGATIVE_NOISES * noise
        if samples == 1:
            return _Direction(zeros=len(zero), witnesses=len(zero), certain=fair)
        if len(zero) == 0:
            return _Direction(zeros=0, witnesses=0, certain=False)
        _, vectors = np.linalg.eigh(zero.T @ zero)
        weakest = vectors[:, 1]  # the first is the direction itself
        says = np.abs(self.rows @ weakest) > VISIBLE_NOISES * self.noise(weakest)
        away = np.abs(heights) / noise
        witnesses = int((says & (away < TIGHT_NOISES)).sum())
        beside = int((says & (away >= TIGHT_NOISES) & (away < ZERO_NOISES)).sum()) * TIGHT_NOISES / (ZERO_NOISES - TIGHT_NOISES)
        speaking = int((np.linalg.norm(zero, axis=1) > VISIBLE_NOISES * noise).sum())
        wanted, many = samples + LEAST_WITNESSES + CHANCE_SLACK * beside, speaking >= LEAST_ZEROS * samples
        enough = many and witnesses >= wanted and not self._hinges(zero @ vectors[:, 1:], noise)
        near = says & (away < ZERO_NOISES)
        weights = _weights(heights[near], noise)  # as they held the direction in place
        leaning = (
            np.sqrt(np.sum(weights * heights[near] ** 2) / np.sum(weights * (self.rows[near] @ weakest) ** 2)) if near.any() else np.inf
        )
        wanted = wanted if fair and many and witnesses < wanted else 0.0
        return _Direction(zeros=speaking, witnesses=witnesses, certain=fair and enough, error=ERROR_SLACK * float(leaning), wanted=wanted)

    def _hinges(self, zero: Array, noise: float) -> bool:
        """Whether single zeros (k, B − 1) hold the direction in place, as those do that an edge between samples meets by being an edge.

        Without them, some way to change the direction leaves all other zeros as they are.
        """
        leverage = np.square(np.linalg.qr(zero)[0]).sum(1)
        rest = zero[leverage < HINGE]
        if len(rest) == len(zero):
            return False
        return len(rest) <= zero.shape[1] or float(np.linalg.svd(rest, compute_uv=False)[-1]) < VISIBLE_NOISES * noise

    def sharpen(self, direction: Array) -> Array:
        """The direction that its zeros alone determine: the least singular vector of the rows, those near zero weighed most."""
        for _ in range(SHARPENINGS):
            heights = self.rows @ direction
            weights = _weights(heights, self.noise(direction))
            _, vectors = np.linalg.eigh(self.rows.T @ (weights[:, None] * self.rows))
            direction = vectors[:, 0] * np.sign(heights @ (self.rows @ vectors[:, 0]))
        return direction


def _weights(heights: Array, noise: float) -> Array:
    """Geman & McClure's: an entry that is no zero has hardly any."""
    return (1 + (heights / (ZERO_NOISES * noise / 5)) ** 2) ** -2


class _Search:
    """The edges of the cone {c : Q c ≥ 0}, found one by one."""

    def __init__(self, mixed: _Mixed, rng: np.random.Generator) -> None:
        self.mixed, self.rng = mixed, rng
        self.doubtful: _Direction | None = None
        middle = mixed.rows.mean(0)
        self.noise = mixed.noise(middle / np.linalg.norm(middle))
        size = np.linalg.norm(mixed.rows, axis=1)
        self.rows = mixed.rows[size > VISIBLE_NOISES * self.noise]
        self.middle = self.rows.sum(0) / max(len(self.rows), 1)  # inside the cone that the rows span
        samples = self.rows.shape[1]
        self.active = self.rows[rng.choice(len(self.rows), min(len(self.rows), 50 * samples), replace=False)]

    def edges(self) -> list[Array]:
        samples = self.rows.shape[1]
        if len(self.rows) < samples or not np.isfinite(self.rows).all():
            return []  # nothing stands out of the noise
        found: list[Array] = []
        if len(self.rows) == 0 or not np.isfinite(self.rows).all():
            return found  # every entry drowns in the errors
        failed = 0  # in a row
        while len(found) < samples and failed < samples + 20:
            failed += 1
            start = self._new_edge(found)
            if start is None:
                continue
            for edge in self._polished(start):
                direction = self.mixed.sharpen(edge)
                told = self.mixed.describe(direction)
                if told.certain:
                    if all(abs(direction @ other) < 1 - 1e-6 for other in found):
                        found.append(direction)
                        failed = 0
                    break
                if told.wanted and (self.doubtful is None or told.witnesses > self.doubtful.witnesses):
                    self.doubtful = told
        return found

    def _new_edge(self, found: list[Array]) -> Array | None:
        """An edge other than those found: a random objective that is zero on them is negative on one of the others, or its opposite is."""
        objective = self.rng.standard_normal(self.rows.shape[1])
        if found:
            known = np.array(found).T
            objective = objective - known @ np.linalg.lstsq(known, objective, rcond=None)[0]
        objective /= np.linalg.norm(objective)
        other = self.rng.standard_normal(len(objective))  # else the objective is always the same where one sample is left
        objective = objective + (AWAY * self.rng.random() / np.linalg.norm(other) * other if found else 0.0)
        for sign in (1.0, -1.0):
            edge = self._lowest(sign * objective)
            if edge is not None and all(abs(edge @ one) < 1 - 1e-6 for one in found):
                return edge
        return None

    def _polished(self, edge: Array) -> Iterator[Array]:
        """The edge, and then edges with more and more zeros: the next objective is the sum of the entries closest to zero."""
        zeros = -1
        for _ in range(POLISHES):
            heights = np.abs(self.rows @ edge)
            now = int((heights < ZERO_NOISES * self.mixed.noise(edge)).sum())
            if now <= zeros:
                return
            yield edge
            zeros = now
            close = heights <= np.quantile(heights, CLOSE)
            lower = self._lowest(self.rows[close].mean(0))
            if lower is None:
                return
            edge = lower

    def _lowest(self, objective: Array) -> Array | None:
        """The unit vector along the vertex of least objective, where rows c ≥ −noise and the mean of rows c is 1."""
        direction = None
        for _ in range(ROUNDS):
            slack = np.full(len(self.active), 10 * self.noise)
            answer = linprog(objective, -self.active, slack, self.middle[None], [1.0], bounds=(None, None), method="highs")
            if answer.status:
                return None
            direction = answer.x / np.linalg.norm(answer.x)
            heights = self.rows @ direction
            violated = np.flatnonzero(heights < -12 * self.noise)
            if len(violated) == 0:
                return direction
            worst = violated[np.argsort(heights[violated])[: 10 * self.rows.shape[1]]]
            self.active = np.concatenate([self.active, self.rows[worst]])
            if len(self.active) > MOST_ROWS:
                self.active = self.active[np.argsort(self.active @ direction)[:ROWS_KEPT]]
        return direction
