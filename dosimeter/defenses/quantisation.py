"""Quantisation of the update to few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, largest_magnitude, live_entries
from dosimeter.interfaces import Attack, Defense, Public, Replay
from dosimeter.options import Constraint
from dosimeter.registry import DEFENSES
from dosimeter.types import Distortion, Encoding, Update

Bits = Annotated[int, Constraint("an int from 2 to 32 (one bit is the `sign` defense)", lambda value: 2 <= value <= 32)]


@DEFENSES.register("quantisation")
@dataclass(frozen=True, kw_only=True)
class Quantisation(OutgoingDefense):
    """Rounds every entry to one of 2^bits − 1 evenly spaced levels between minus and plus its layer's largest magnitude.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017: one bit for the
    sign, the rest for the magnitude. With `stochastic`, rounding up or down is drawn so that the mean is exact (QSGD's
    Eq. for ξ); without it, entries go to the nearest level. 32 bits send the update as it is.
    Departure: levels span the layer's largest magnitude, as is common in practice, instead of its L2 norm.
    """

    promise: ClassVar[str] = "nothing: every entry is known to within half a step"
    breaks: ClassVar[str] = "entries far below their layer's largest one, which round to zero"
    strengths: ClassVar = ({"bits": 4}, {"bits": 2})

    bits: Bits
    stochastic: bool = False

    def distorts(self) -> bool:
        return self.bits < 32

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.bits == 32:
            return dict(update)
        return {name: self._quantise(change, rng) for name, change in update.items()}

    def step(self, change: Tensor) -> Tensor:
        """The distance between two levels of a layer, in float64: ()."""
        return change.abs().max().double() / (2 ** (self.bits - 1) - 1)

    def deviation(self, change: Tensor) -> float:
        """The standard deviation of a layer's rounding errors."""
        return float(self.step(change)) / (6 if self.stochastic else 12) ** 0.5 if change.numel() else 0.0

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        """An entry lies within a step of its level. In a bias, whose sums are used, the rounding counts as noise."""
        if change.ndim < 2 or change.numel() == 0:
            return live_entries(change, noise=self.deviation(change))
        reach, most = float(self.step(change)) * (1.0 if self.stochastic else 0.5), largest_magnitude(change)
        whole = live_entries(change)
        low, high = (change - reach).clamp_min(-most), (change + reach).clamp_max(most)
        return replace(whole, live=~whole.live, low=low, high=high)

    def scaling(self) -> Literal["none"]:
        return "none"

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        if self.bits == 32:
            return super().replay(sent, attack, later)
        sizes = {name: self.deviation(change) for name, change in sent.items()}
        return Replay(note="every layer is weighed by the known variance of its rounding", deviation=sizes)

    def encoding(self, before: Encoding) -> Encoding:
        return Encoding(bits=self.bits, sparse=before.sparse) if self.bits < 32 else before

    def _quantise(self, change: Tensor, rng: Generator) -> Tensor:
        if change.numel() == 0 or not change.any():
            return change
        step = self.step(change)
        levels = change.double() / step
        if self.stochastic:
            uniform = torch.rand(change.shape, generator=rng, dtype=torch.float64, device=rng.device).to(change.device)
            levels = (levels + uniform).floor()
        else:
            levels = levels.round()
        return (levels * step).to(change.dtype)
