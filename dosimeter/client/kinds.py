"""What kind of numbers an update holds, measured: the weights after training, their difference, or a gradient.

Ours; in no paper. The measurements use nothing but the weights that the server sent.

- Weights after training are the weights before plus what training added, which has little to do with them. A sum of unrelated numbers
  has at least the entropy of each. So taking the old weights away lowers the entropy of weights after training, whatever the learning rate
  and the optimiser, and raises that of gradients and differences. Entropies are Vasicek's (1976), by the gaps between sorted numbers.
- Where a loss depends on differences of logits alone, each gradient of the output layer sums to zero over the classes. Training by sums of
  gradients then keeps the sums of the weights, up to a factor of weight decay, however far it throws the weights themselves. Steps of
  Adam and its like keep no sums.
- The difference of two float32 weights lies on the grid of float32 around the weight: added to the weight it gives another float32
  number. An entry of a gradient has digits below that grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["gradient", "difference", "weights"]

FEWEST_ENTRIES = 32  # that an entropy rests on
MOST_ENTRIES = 2**16  # that are sorted: evenly spaced ones of larger models
GAPS_A_ROOT = 4  # the gaps of √n / 4 sorted numbers apart tell the entropy of n
FEWEST_BITS = 24  # of digits below the grid, which unrelated numbers fill at random
BITS_AN_ENTRY = 8  # at most, so that no few entries decide
ON_GRID = 0.999  # share of entries that a difference of weights has on the grid; computed from two numbers, it has all
USES_GRID = 0.03  # share at odd multiples of the last place: half of a difference's entries; coarse numbers that lie on the grid have none
FEWEST_SUMS = 16  # over classes that must agree; unrelated sums have no such cosine
UNBALANCED = 0.5  # of a gradient's norm: sums over classes that rounding and weight decay do not explain
KEPT = 0.9  # least cosine of sums over classes that training kept; rounding takes the rest
COARSE_BITS = 11  # digits of half precision
COARSE = 0.99  # share of entries with so few digits from which an update counts as rounded on its way


@dataclass(frozen=True, kw_only=True)
class Resemblance:
    """How an update lies to the model's own weights."""

    cosine: float
    narrowed: float  # the entropy of the update less that of the update without the weights, in nats

    @property
    def is_weights(self) -> bool:
        return self.narrowed > 0

    def __str__(self) -> str:
        verb = "narrows" if self.is_weights else "widens"
        does = f"{verb} its spread by {math.exp(abs(self.narrowed)):.3g}"
        return f"its cosine with the model's own weights is {self.cosine:.2g}, and taking these weights away {does}"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Whether a step from each weight by the update's entry ends at a number of the model's precision, up to the rounding of the entry.

    Only of entries with digits below the last place of the number where they lead: of others, every step does.
    """

    entries: int
    bits: int  # of such digits
    ended: float  # share of entries whose step does
    finest: float  # share at odd multiples of the last place

    @property
    def tells(self) -> bool:
        return self.bits >= FEWEST_BITS

    @property
    def is_difference(self) -> bool:
        return self.tells and self.finest >= USES_GRID and self.ended >= ON_GRID


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Whether the model's weights plus the update are numbers of the model's precision."""

    onwards: Steps  # of the update, as after − before
    backwards: Steps  # of its negative, as before − after
    coarse: bool  # the entries have the digits of half precision at most, so that they tell nothing
    dtype: torch.dtype

    @property
    def is_difference(self) -> bool:
        return self.onwards.is_difference or self.backwards.is_difference

    @property
    def is_reversed(self) -> bool:
        """Whether a difference is before − after."""
        return self.is_difference and not self.onwards.ended >= self.backwards.ended

    @property
    def is_off(self) -> bool:
        """Whether the entries are no difference of two weights."""
        return not self.coarse and all(steps.tells and steps.ended < ON_GRID for steps in (self.onwards, self.backwards))

    def __str__(self) -> str:
        best = max(self.onwards, self.backwards, key=lambda steps: steps.ended)
        kind = str(self.dtype).removeprefix("torch.")
        share = f"{best.ended:.1%} of {best.entries} entries"
        return f"{share} lead from a weight to another {kind} number, as all of a difference do and few of a gradient"


def resemblance(update: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float = 1.0) -> Resemblance | None:
    """How the update lies to the weights of the same names; None where too few entries can tell.

    Weight decay alone turns the weights before into `decay` times them. That is taken away on both sides.
    """
    every = max(1, math.ceil(sum(change.numel() for change in update.values()) / MOST_ENTRIES))
    sent, own = (_strung([tensors[name] for name in update])[::every] for tensors in (update, weights))
    sent, own = sent[own != 0], own[own != 0]
    if len(own) < FEWEST_ENTRIES or not sent.any():
        return None
    last_place = float(own.abs().median()) * max(torch.finfo(weights[name].dtype).eps for name in update)
    narrowed = _entropy(sent - (decay - 1) * own, last_place) - _entropy(sent - decay * own, last_place)
    return Resemblance(cosine=float(sent @ own / (sent.norm() * own.norm())), narrowed=narrowed)


def grid_of(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Grid:
    """Which entries of the update are differences of two numbers of the weights' precision."""
    counts, digits, entries = torch.zeros(2, 4, dtype=torch.float64), 0, 0
    for name, change in update.items():
        weight = weights[name].detach().to(change.device)
        u, w = change.detach().double().flatten(), weight.double().flatten()
        u, w = u[u != 0], w[u != 0]
        counts += torch.stack([_steps(w, step, weight.dtype) for step in (u, -u)])
        coarse = torch.frexp(u).mantissa * 2**COARSE_BITS
        digits, entries = digits + int((coarse == coarse.round()).sum()), entries + len(u)
    onwards, backwards = (
        Steps(entries=int(count), bits=int(bits), ended=ended / max(count, 1), finest=finest / max(count, 1))
        for count, bits, ended, finest in counts.tolist()
    )
    dtype = max((weights[name].dtype for name in update), key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
    coarse = digits >= COARSE * entries and max(onwards.finest, backwards.finest) < USES_GRID
    return Grid(onwards=onwards, backwards=backwards, coarse=coarse, dtype=dtype)


def keeps_class_sums(sent: Tensor, weight: Tensor) -> bool:
    """Whether rows of an output layer (C, H) sum over the classes to what the rows of the weights before sum to, but for weight decay."""
    sums, own = (tensor.detach().double().sum(0) for tensor in (sent, weight.to(sent.device)))  # (H,)
    product, squares = float(sums @ own), float(own @ own)
    if len(weight) < 2 or len(own) < FEWEST_SUMS or product <= 0:
        return False
    return 0.5 * squares < product < 1.5 * squares and product > KEPT * math.sqrt(squares * float(sums @ sums))


def breaks_class_sums(sent: Tensor, weight: Tensor) -> bool:
    """Whether rows of an output layer (C, H) are no gradient: their sums over the classes are neither zero nor along the weights' own."""
    sums, own = (tensor.detach().double().sum(0) for tensor in (sent, weight.to(sent.device)))  # (H,)
    along = float(sums @ own) / max(float(own @ own), torch.finfo(torch.float64).tiny)
    return len(sums) >= FEWEST_SUMS and float((sums - along * own).norm()) > UNBALANCED * float(sent.double().norm())


def _strung(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.detach().double().cpu().flatten() for tensor in tensors)])


def _steps(weight: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the steps from weights by changes: how many tell, their digits, how many end at numbers of `dtype`, and how many are finest: (4,).

    A difference u = fl(a − w) lies within half its own last place of a − w, a number of `dtype`. Where that last place is smaller than
    a's, other numbers lie so near with probability 2^−k, k the digits between. The error of w + u in float64 is Knuth's TwoSum.
    """
    total = weight + change
    taken = total - weight
    error = (weight - (total - taken)) + (change - taken)
    end = total.to(dtype).double()
    last, of_weight, of_end = (_last_place(numbers, dtype) for numbers in (change, weight, end))
    tells = of_end > last
    bits = torch.log2(of_end / last).clamp(0, BITS_AN_ENTRY)
    ends = ((end - total) - error).abs() <= last / 2
    finest = (change / torch.maximum(last, torch.minimum(of_weight, of_end))).remainder(2) == 1
    return torch.stack([(tells * count).sum() for count in (torch.ones_like(bits), bits, ends, finest)]).cpu()


def _last_place(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return torch.ldexp(torch.ones_like(numbers), torch.frexp(numbers).exponent - digits)


def _entropy(numbers: Tensor, last_place: float) -> float:
    """Up to a constant: the mean logarithm of the gaps between sorted numbers, none below the last place of a weight."""
    apart = math.ceil(math.sqrt(len(numbers)) / GAPS_A_ROOT)
    ordered = numbers.sort().values
    return float((ordered[apart:] - ordered[:-apart] + last_place).log().mean())
