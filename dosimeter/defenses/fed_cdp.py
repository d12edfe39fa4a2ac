"""Fed-CDP: DP-SGD whose clipping bound, and with it the noise, shrinks over the rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Generator, nn

from dosimeter.defenses.dpsgd import DPSGD, ClippedSGD
from dosimeter.interfaces import Client, Defense
from dosimeter.options import NonNegativeInt, OptionError, PositiveFloat, PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused


@DEFENSES.register("fed_cdp")
@dataclass(frozen=True, kw_only=True)
class FedCDP(DPSGD):
    """Clips every sample's gradient, layer by layer, to a bound that shrinks over the rounds, and adds noise in proportion to the bound.

    Wei, Liu, Wu, Su & Iyengar, "Gradient-Leakage Resilient Federated Learning", ICDCS 2021 (thesis Table 2.2, adaptive noise): Fed-CDP
    with decaying clipping. Gradients shrink as a model is trained, and so does what has to be hidden. The bound C_t falls in a line from
    `max_norm` in the first round to `last_norm` in the last. The update is (Σ_i clip(g_i, C_t) + N(0, (noise_multiplier · C_t)²)) / B,
    with one clipping factor for each sample and tensor; the paper's released code clips so too. The line and its ends 6 and 2 are from
    memory of the paper.
    Departures: ε counts that one sample moves each of `tensors` tensors by C_t, hence the whole update by C_t √tensors. An account with
    noise_multiplier alone, as for DP-SGD, is too small. `tensors=1` clips each sample's gradient as a whole. The sum is divided by the
    size of this batch (see `dpsgd`).
    """

    promise: ClassVar[str] = "(ε, δ) for each sample, as of DP-SGD with noise_multiplier / √tensors: see `epsilon`"
    strengths: ClassVar = (
        {"max_norm": 6.0, "last_norm": 2.0, "noise_multiplier": 0.1},
        {"max_norm": 6.0, "last_norm": 2.0, "noise_multiplier": 1.0},
    )

    last_norm: PositiveFloat
    rounds: PositiveInt = 100
    round: NonNegativeInt = 0  # the audited one, from 0
    tensors: PositiveInt = 1  # of the model, each of which is clipped by itself; 1: a sample's gradient is clipped as a whole

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isinf(self.max_norm) or not self.last_norm <= self.max_norm:
            raise OptionError("last_norm", f"expected at most max_norm, which must be finite, got {self.last_norm} and {self.max_norm}")
        if self.round >= self.rounds:
            raise OptionError("round", f"expected less than rounds = {self.rounds}, got {self.round}")

    def bound(self) -> float:
        """C_t of the audited round."""
        if self.rounds == 1:
            return self.max_norm
        return self.max_norm - (self.max_norm - self.last_norm) * self.round / (self.rounds - 1)

    def in_round(self, number: int) -> Defense:
        return replace(self, round=min(self.round + number, self.rounds - 1))

    def multiplier(self) -> float:
        return self.noise_multiplier / math.sqrt(self.tensors)

    def clipped(self) -> ClippedSGD:
        return ClippedSGD(max_norm=self.bound(), each_tensor=self.tensors > 1)

    def __call__(self, client: Client, rng: Generator) -> Client:
        if self.tensors > 1:
            _require_tensors(client.model, self.tensors)
        return super().__call__(client, rng)


def _require_tensors(model: nn.Module, expected: int) -> None:
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    if trained != expected:
        raise Refused(f"fed_cdp.tensors: this model trains {trained} tensors, got {expected}; ε depends on their number")
