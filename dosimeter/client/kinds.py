"""What kind of numbers an update holds, measured: the weights after training, their difference, or a gradient.

Ours; in no paper. Two measurements use nothing but the weights that the server sent.

- Weights after training lie around the weights before. A gradient lies around zero. Entry by entry, the ratio to the old weight
  gathers near 1 or near 0, whatever the learning rate.
- The difference of two float32 weights lies on the grid of float32 around the weight: added to the weight it gives another float32
  number, without rounding. An entry of a gradient that is much smaller than its weight has digits below that grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["gradient", "difference", "weights"]

FEWEST_ENTRIES = 32  # that a measurement rests on
SMALL_SHARE = 0.25  # of a weight: smaller entries have digits below the weight's last place
ON_GRID = 0.999  # share of entries that a difference of weights has on the grid; computed from two numbers, it has all
USES_GRID = 0.03  # share at odd multiples of the last place: half of a difference's entries; coarse numbers that lie on the grid have none
COARSE_BITS = 11  # digits of half precision
COARSE = 0.99  # share of entries with so few digits from which an update counts as rounded on its way


@dataclass(frozen=True, kw_only=True)
class Resemblance:
    """How an update lies to the model's own weights."""

    entries: int  # with a weight that is not zero
    cosine: float
    near_weights: float  # share of the weights' mass at which the update is within half a weight of the weight
    near_zero: float  # the same of zero

    @property
    def is_weights(self) -> bool:
        return self.near_weights > self.near_zero

    def __str__(self) -> str:
        return f"its cosine with the model's own weights is {self.cosine:.2g}, and {self.near_weights:.0%} of it lies within half of them"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Whether the model's weights plus the update are numbers of the model's precision, of entries much smaller than their weight."""

    entries: int
    onwards: float  # share of entries that added to the weight need no rounding, as those of after − before
    backwards: float  # the same of entries that are subtracted, as those of before − after
    finest: float  # share at odd multiples of the weight's last place
    coarse: bool  # the entries have the digits of half precision at most, so that they tell nothing
    dtype: torch.dtype

    @property
    def is_difference(self) -> bool:
        return self._tells and self.finest >= USES_GRID and max(self.onwards, self.backwards) >= ON_GRID

    @property
    def is_reversed(self) -> bool:
        """Whether a difference is before − after."""
        return self.is_difference and self.backwards > self.onwards

    @property
    def is_off(self) -> bool:
        """Whether the entries are no difference of two weights."""
        return self._tells and not self.coarse and max(self.onwards, self.backwards) < ON_GRID

    @property
    def _tells(self) -> bool:
        return self.entries >= FEWEST_ENTRIES

    def __str__(self) -> str:
        share = f"{max(self.onwards, self.backwards):.1%} of {self.entries} small entries"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{share} lead from a weight to another {kind} number without rounding, as all of a difference do and few of a gradient"


def resemblance(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Resemblance | None:
    """How the update lies to the weights of the same names; None where too few entries can tell."""
    product = squares = own = mass = near_weights = near_zero = 0.0
    entries = 0
    for name, change in update.items():
        u, w = change.detach().double().flatten(), weights[name].detach().to(change.device).double().flatten()
        product, squares, own = product + float(u @ w), squares + float(u @ u), own + float(w @ w)
        size = w.abs()
        mass, entries = mass + float(size.sum()), entries + int(w.count_nonzero())
        near_weights += float(size[(u - w).abs() <= size / 2].sum())
        near_zero += float(size[u.abs() <= size / 2].sum())
    if entries < FEWEST_ENTRIES or not mass > 0 or not squares > 0:
        return None
    cosine = product / math.sqrt(squares * own)
    return Resemblance(entries=entries, cosine=cosine, near_weights=near_weights / mass, near_zero=near_zero / mass)


def grid_of(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Grid:
    """Which entries of the update are differences of two numbers of the weights' precision."""
    counts = torch.zeros(5, dtype=torch.float64)
    kinds = [weights[name].dtype for name in update]
    for name, change in update.items():
        weight = weights[name].detach().to(change.device)
        u, w = change.detach().double().flatten(), weight.double().flatten()
        small = (u != 0) & (u.abs() <= SMALL_SHARE * w.abs())
        u, w = u[small], w[small]
        digits = 1 - round(math.log2(torch.finfo(weight.dtype).eps))
        last_place = torch.ldexp(torch.ones_like(w), torch.frexp(w).exponent - digits)
        multiple = u / last_place
        coarse = torch.frexp(u).mantissa * 2**COARSE_BITS
        tests = (_is_exact(w, u, weight.dtype), _is_exact(w, -u, weight.dtype), multiple.remainder(2) == 1, coarse == coarse.round())
        counts += torch.tensor([len(u), *(int(test.sum()) for test in tests)], dtype=torch.float64)
    onwards, backwards, finest, coarse = (counts[1:] / counts[0].clamp_min(1)).tolist()
    dtype = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
    return Grid(
        entries=int(counts[0]),
        onwards=onwards,
        backwards=backwards,
        finest=finest,
        coarse=coarse >= COARSE and finest < USES_GRID,
        dtype=dtype,
    )


def _is_exact(weight: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the sum, in float64, is a number of `dtype`. The error of the sum itself is Knuth's TwoSum."""
    total = weight + change
    taken = total - weight
    error = (weight - (total - taken)) + (change - taken)
    return (error == 0) & (total.to(dtype).double() == total)
