"""The chance that any attacker recovers a sample behind clipping and Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from dosimeter.engines.bounds.reconstruction_robustness import success_bound
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.options import Fraction, NonNegativeInt, PositiveInt
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling, Refused


@BOUNDS.register("reconstruction_robustness")
@dataclass(frozen=True, kw_only=True)
class ReconstructionRobustness(Bound):
    """Limits the success of any attacker who has a prior, from the clipping norm and the noise alone.

    Hayes, Mahloujifar & Balle, "Bounding Training Data Reconstruction in DP-SGD", NeurIPS 2023: Theorem 2, Corollary 3.
    `chance` is the success without the update, such as 1 in 10 candidates. The value is the largest success with it, of `steps`
    rounds, in each of which a sample takes part with probability `sample_rate`.
    Departure: clipping of the whole update with noise after it is covered too. There the noise alone stands in for the update, which
    the batch moves by at most the clipping norm.
    """

    surface: ClassVar[str] = "inputs"
    metric: ClassVar[str] = "identified"

    chance: Fraction = 0.1
    steps: NonNegativeInt = 1
    sample_rate: Fraction = 1.0
    draws: PositiveInt = 100_000

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        known = mechanism.noise_multipliers
        if not known:
            raise Refused(
                "reconstruction_robustness needs Gaussian noise on a clipped update: dpsgd, or clipping by norm before gaussian_noise"
            )
        unit = "sample" if "sample" in known else "client"
        rate = self.sample_rate if unit == "sample" else 1.0  # a client's whole batch takes part in each of its rounds
        bound = success_bound(
            noise_multiplier=known[unit], chance=self.chance, sample_rate=rate, steps=self.steps, draws=self.draws, rng=_on_cpu(rng)
        )
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.full((len(mechanism.client.batch.inputs),), bound.high, dtype=torch.float64),
            proved=True,
            assumptions=(
                f"Without the update, an attacker succeeds with probability {self.chance:g}.",
                "The attacker knows all other samples." if unit == "sample" else "The whole batch counts as one secret.",
                f"The update is sent {self.steps} times, and nothing else about the sample is sent.",
            ),
            details={"low": bound.low, "high": bound.high, "value": bound.value, "chance": self.chance, "noise_multiplier": known[unit]},
        )


def _on_cpu(rng: Generator) -> Generator:
    return torch.Generator().manual_seed(rng.initial_seed())
