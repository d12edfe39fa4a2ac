"""Where mixtures touch the least value of an activation: the samples are corners of the polytope of mixtures that nowhere fall below it.

SiLU and GELU have a least value, as a ReLU has zero. Many entries of a sample lie next to it, since the activation is flat there. A corner
of {c : M c ≥ least} that is no sample touches the least value in as many entries as there are samples, and hardly more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.interfaces import Exposure
from dosimeter.network.layer_shapes import PROBES
from dosimeter.network.probing import input_of
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator

Array = NDArray[np.float64]

ROWS = 60  # of a linear program at first, for each sample
ROUNDS = 20  # of adding the rows that a linear program's answer violates
TRIES = 6  # pairs of linear programs for each sample
AWAY = 0.5  # of a random objective that is added at most to the one that is zero at the samples found
ASTRAY = 3  # corners for each sample that are none of a sample, after which the search ends
POLISHES = 5
SAME = 0.1  # of a corner's norm, within which another one is the same
CLOSE = 0.1  # an entry comes close to the least value within as much of it
NEAR = 1e-2  # an entry touches the least value within as much of it
LEAST_TOUCHES = 12  # beyond three for each sample
LARGEST_SPREAD = 1e-3  # of single probes' least values, relative, up to which the least value is the activation's own


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least that a layer's inputs can be, as far as probes tell."""

    value: float
    spread: float  # of the least values of single probes, relative

    @property
    def hard(self) -> bool:
        """Whether every probe comes down to the same value, as behind an activation that has a least value."""
        return self.value < 0 and self.spread < LARGEST_SPREAD


def find_floor(exposure: Exposure, layer: ConvolutionLayer) -> Floor:
    rng = generator(0, "probes of the convolutions")
    pixels = torch.rand(8 * PROBES, *exposure.public.input_shape, generator=rng)
    probes = from_pixels(pixels, exposure.public.normalization).to(next(exposure.model.parameters()))
    lowest = input_of(exposure.model, layer.name, probes).flatten(1).amin(1).double()
    value = float(lowest.min())
    return Floor(value=value, spread=float(lowest.max() - value) / abs(value) if value else 0.0)


@dataclass(frozen=True, kw_only=True)
class Corners:
    """Corners of the polytope of mixtures, those that touch its walls most often first."""

    coefficients: Tensor  # (m, B)
    touching: Tensor  # (m,) bool: touches in so many entries that it is a sample's

    @property
    def samples(self) -> Tensor:
        """(≤ B, B), one corner a sample."""
        return self.coefficients[self.touching]


def find_corners(mixtures: Tensor, least: float, rng: np.random.Generator) -> Corners | None:
    """(B, entries) mixtures -> corners that linear programs lead to; None where the mixtures have no lower bound.

    An objective is about zero at the samples' corners that are found, so that another one is lower, or is where the objective's sign
    changes.
    """
    flat = mixtures.T.cpu().numpy()  # (entries, B)
    samples = flat.shape[1]
    if not np.isfinite(least) or least >= 0:
        return None
    search = _Search(flat, least, rng)
    found: list[tuple[int, Array]] = []
    known: list[Array] = []
    for _ in range(TRIES * samples):
        objective = _objective(known, rng, flat.T @ flat / len(flat))
        for sign in (1, -1):
            corner, touches = search.polished(sign * objective)
            if corner is None or any(search.alike(corner, other) for _, other in found):
                continue
            found.append((touches, corner))
            if touches >= 3 * samples + LEAST_TOUCHES:
                known.append(corner)
                break
        if len(known) == samples or len(found) - len(known) > ASTRAY * samples:
            break
    found.sort(key=lambda one: -one[0])
    if not found:
        return None
    touching = torch.tensor([touches >= 3 * samples + LEAST_TOUCHES for touches, _ in found])
    return Corners(coefficients=torch.tensor(np.array([corner for _, corner in found])).to(mixtures), touching=touching)


def _objective(known: list[Array], rng: np.random.Generator, spread: Array) -> Array:
    """A random objective that is nearly zero at the samples found. Exactly zero, it would be the same again where one sample is left."""
    first, second = rng.standard_normal((2, len(spread))) @ spread
    if not known:
        return first
    taken = np.array(known).T  # (B, k)
    first = first - taken @ np.linalg.lstsq(taken, first, rcond=None)[0]
    return first / np.linalg.norm(first) + AWAY * rng.random() * second / np.linalg.norm(second)


class _Search:
    """The lowest corner for an objective, over few of the walls; those that the answer breaks are added."""

    def __init__(self, flat: Array, least: float, rng: np.random.Generator) -> None:
        self.flat, self.least = flat, least
        self.rows = flat[rng.choice(len(flat), min(len(flat), ROWS * flat.shape[1]), replace=False)]

    def alike(self, one: Array, other: Array) -> bool:
        return bool(np.linalg.norm(self.flat @ (one - other)) < SAME * np.linalg.norm(self.flat @ one))

    def polished(self, objective: Array) -> tuple[Array | None, int]:
        """A corner and in how many entries it touches the least value.

        A corner next to a sample's comes close to the least value where the sample does. The sum of these entries is the next objective.
        """
        best, most = None, 0
        for _ in range(POLISHES):
            corner = self.lowest(objective)
            if corner is None:
                break
            heights = self.flat @ corner
            touches = int((heights < (1 - NEAR) * self.least).sum())
            if touches <= most:
                break
            best, most = corner, touches
            objective = self.flat[heights < (1 - CLOSE) * self.least].sum(0)
        return best, most

    def lowest(self, objective: Array) -> Array | None:
        for _ in range(ROUNDS):
            answer = linprog(objective, -self.rows, np.full(len(self.rows), -self.least), bounds=(None, None), method="highs")
            if answer.status:
                return None
            heights = self.flat @ answer.x
            violated = np.flatnonzero(heights < self.least * (1 + 1e-6))
            if len(violated) == 0:
                return answer.x
            self.rows = np.concatenate([self.rows, self.flat[violated[np.argsort(heights[violated])[: 10 * self.flat.shape[1]]]]])
        return None
