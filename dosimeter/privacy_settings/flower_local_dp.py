"""Flower's client mod for local differential privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.gaussian_mechanism import classical_deviation, exact_epsilon, found_members
from dosimeter.interfaces import PrivacySetting
from dosimeter.numbers import significant
from dosimeter.privacy_settings.ranges import Positive, PositiveOrZero, Probability
from dosimeter.registry import PRIVACY
from dosimeter.types import PrivacyReading

FALSE_ALARMS = 0.01


@PRIVACY.register("flower_local_dp")
@dataclass(frozen=True, kw_only=True)
class FlowerLocalDP(PrivacySetting):
    """Flower's `LocalDpMod`: clips what a client sends and adds noise for an ε whose sensitivity is typed by hand.

    Read in flwr 1.41.0, clientapp/mod/localdp_mod.py and supercore/differential_privacy.py. The difference of the weights is scaled to a
    norm of at most `clipping_norm`. Each entry then gets N(0, σ²) with σ = sensitivity · √(2 ln(1.25/δ)) / ε, the classical theorem
    (Dwork & Roth, "The Algorithmic Foundations of Differential Privacy", 2014: Theorem A.1).
    Two updates within the clipping norm C differ by up to 2 C. So ε holds where the sensitivity is 2 C at least, and ε below 1. The
    exact ε comes from Balle & Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018: Theorem 8.
    """

    framework: ClassVar[str] = "flwr 1.41.0"
    strengths: ClassVar = ({"clipping_norm": 1.0, "sensitivity": 2.0, "epsilon": 1.0, "delta": 1e-5},)

    clipping_norm: Positive
    sensitivity: PositiveOrZero
    epsilon: Positive
    delta: Probability
    whole_numbers: bool = False  # whether integers are sent too, such as batch norm's count of batches

    @property
    def deviation(self) -> float:
        """Of the noise in each entry of the weights."""
        return classical_deviation(self.sensitivity, self.epsilon, self.delta)

    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        delta = self.delta if delta is None else delta
        ratio = 2 * self.clipping_norm / self.deviation if self.deviation > 0 else math.inf
        moved = math.inf if self.whole_numbers else ratio * math.sqrt(rounds)
        why = f"noise {significant(self.deviation)} on an update that another client's can move by 2 × {self.clipping_norm:g}"
        if self.whole_numbers:
            why = "whole numbers leave with noise that is cut to whole numbers, which no theorem covers"
        both = {
            "change": "replaced",
            "against": "the server",
            "stated": self.epsilon,
            "proved": exact_epsilon(moved, delta),
            "delta": delta,
            "found": found_members(FALSE_ALARMS, moved=moved),
        }
        return (
            PrivacyReading(unit="client", reason=why, **both),
            PrivacyReading(unit="sample", reason=f"one sample may change the whole clipped update, so no more holds: {why}", **both),
        )

    def trial(self, reading: PrivacyReading, rounds: int, draws: int, rng: Generator) -> tuple[Tensor, Tensor] | None:
        """Two updates at the clipping norm, of opposite directions, seen along that direction."""
        if reading.unit != "client":
            return None
        spread = self.deviation * math.sqrt(rounds)
        noise = torch.randn(2, draws, generator=rng, dtype=torch.float64) * spread
        return noise[0] + rounds * self.clipping_norm, noise[1] - rounds * self.clipping_norm

    def caveats(self) -> tuple[str, ...]:
        found = ["the stated ε is of one round, and nothing in Flower adds up the rounds"]
        if self.sensitivity < 2 * self.clipping_norm:
            found.append(f"sensitivity {self.sensitivity:g} was typed, and two clipped updates differ by up to {2 * self.clipping_norm:g}")
        if self.epsilon >= 1:
            found.append(f"the formula behind the noise is proved for ε below 1, and {self.epsilon:g} was typed")
        return (*found, "the noise is of floating-point numbers, whose last digits can tell more than real numbers do")

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (("clipping", {"max_norm": self.clipping_norm / unit}), ("gaussian_noise", {"std": self.deviation / unit}))

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        if type(thing).__name__ != "LocalDpMod":
            return None
        return {name: float(getattr(thing, name)) for name in ("clipping_norm", "sensitivity", "epsilon", "delta")}
