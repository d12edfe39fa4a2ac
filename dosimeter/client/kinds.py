"""What kind of numbers an update holds, measured: the weights after training, their difference, or a gradient.

Ours; in no paper. The measurements use nothing but the weights that the server sent.

- Weights after training are the weights before plus what training added, which has little to do with them. The least-squares fit of
  the sent numbers to the old weights then has a slope near 1, whatever the learning rate. Of gradients and differences it is near 0.
  Where training threw a part of the weights far away, the others still lie near their old values. Unrelated numbers lie near the
  weights' negatives as often.
- Where a loss depends on differences of logits alone, each gradient of the output layer sums to zero over the classes. Training by sums of
  gradients then keeps the sums of the weights, up to a factor of weight decay, however far it throws the weights themselves.
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
BY_CHANCE = 4.0  # standard deviations, 1/√n each, that the cosine of unrelated numbers stays within
MIRRORED = 2.0  # how many times as much lies near the weights as near their negatives; of unrelated numbers, as much
SMALL_SHARE = 0.25  # of a weight: smaller entries have digits below the weight's last place
ON_GRID = 0.999  # share of entries that a difference of weights has on the grid; computed from two numbers, it has all
USES_GRID = 0.03  # share at odd multiples of the last place: half of a difference's entries; coarse numbers that lie on the grid have none
FEWEST_SUMS = 16  # over classes that must agree; unrelated sums have no such cosine
KEPT = 0.9  # least cosine of sums over classes that training kept; rounding takes the rest
COARSE_BITS = 11  # digits of half precision
COARSE = 0.99  # share of entries with so few digits from which an update counts as rounded on its way


@dataclass(frozen=True, kw_only=True)
class Resemblance:
    """How an update lies to the model's own weights."""

    entries: int  # with a weight that is not zero
    cosine: float
    slope: float  # of the least-squares fit of the update to the weights
    near_weights: float  # share of the weights' mass at which the update is within half a weight of the weight
    near_zero: float  # the same of zero
    near_negatives: float  # the same of the weight's negative

    @property
    def is_weights(self) -> bool:
        fits = self.slope > 0.5 and self.cosine * math.sqrt(self.entries) > BY_CHANCE
        return fits or (self.near_weights > self.near_zero and self.near_weights > MIRRORED * self.near_negatives)

    def __str__(self) -> str:
        return f"its cosine with the model's own weights is {self.cosine:.2g}, and it is {self.slope:.2g} times them on average"


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
    product = squares = own = mass = near_weights = near_zero = near_negatives = 0.0
    entries = 0
    for name, change in update.items():
        u, w = change.detach().double().flatten(), weights[name].detach().to(change.device).double().flatten()
        product, squares, own = product + float(u @ w), squares + float(u @ u), own + float(w @ w)
        size = w.abs()
        mass, entries = mass + float(size.sum()), entries + int(w.count_nonzero())
        near_weights += float(size[(u - w).abs() <= size / 2].sum())
        near_zero += float(size[u.abs() <= size / 2].sum())
        near_negatives += float(size[(u + w).abs() <= size / 2].sum())
    if entries < FEWEST_ENTRIES or not own > 0 or not squares > 0:
        return None
    near = {"near_weights": near_weights / mass, "near_zero": near_zero / mass, "near_negatives": near_negatives / mass}
    return Resemblance(entries=entries, cosine=product / math.sqrt(squares * own), slope=product / own, **near)


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


def keeps_class_sums(sent: Tensor, weight: Tensor) -> bool:
    """Whether rows of an output layer (C, H) sum over the classes to what the rows of the weights before sum to, but for weight decay."""
    sums, own = (tensor.detach().double().sum(0) for tensor in (sent, weight.to(sent.device)))  # (H,)
    product, squares = float(sums @ own), float(own @ own)
    if len(weight) < 2 or len(own) < FEWEST_SUMS or product <= 0:
        return False
    return product > 0.5 * squares and product > KEPT * math.sqrt(squares * float(sums @ sums))


def _is_exact(weight: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the sum, in float64, is a number of `dtype`. The error of the sum itself is Knuth's TwoSum."""
    total = weight + change
    taken = total - weight
    error = (weight - (total - taken)) + (change - taken)
    return (error == 0) & (total.to(dtype).double() == total)
