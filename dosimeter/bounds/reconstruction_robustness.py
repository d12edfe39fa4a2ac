"""The chance that any attacker recovers a sample behind clipping and Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator

from dosimeter.engines.bounds.candidates import identify
from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.engines.bounds.reconstruction_robustness import success_bound
from dosimeter.engines.privacy import gaussian_epsilon
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.options import Fraction, NonNegativeInt, PositiveInt
from dosimeter.registry import BOUNDS
from dosimeter.types import Accountant, Ceiling, ProtectedUnit, Refused

ACCOUNTANTS: tuple[Accountant, ...] = ("rdp", "prv")  # upper bounds, both; gdp is an approximation
DELTA = 1e-5
TRIALS = 2000  # of the attacker for each sample
MOST_VALUES = 2**25  # of the candidates' updates, held in memory at one time


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
                "The attacker knows all other samples, which tell nothing of this one."
                if unit == "sample"
                else "The whole batch counts as one secret.",
                f"The update is sent {self.steps} times, and nothing else about the sample is sent.",
            ),
            details={
                "low": bound.low,
                "high": bound.high,
                "value": bound.value,
                "chance": self.chance,
                "noise_multiplier": known[unit],
                "steps": self.steps,
                "sample_rate": rate,
                **self._attack(mechanism, rate, rng),
                **_epsilons(known[unit], unit, rate, self.steps),
            },
        )

    def _attack(self, mechanism: Mechanism, rate: float, rng: Generator) -> dict[str, Any]:
        """The share of trials in which the paper's attacker picks the sample out of 1/chance candidates, where there are so many.

        The others are auxiliary samples, with the sample's own label. Every round repeats this update.
        """
        auxiliary, others = mechanism.auxiliary, round(1 / self.chance) - 1 if self.chance > 0 else 0
        if auxiliary is None or not 1 <= others <= len(auxiliary.inputs) or rate < 1 or self.steps == 0:
            return {}
        if (others + 1) * sum(p.numel() for p in mechanism.client.model.parameters()) > MOST_VALUES:
            return {}
        try:
            problem = PixelProblem(mechanism, self.name)
        except Refused:  # of tokens, for one
            return {}
        candidates, hits = auxiliary.inputs[:others].to(problem.inputs), []
        for sample, own in enumerate(problem.inputs):
            sent = problem.jacobian.sent(sample, torch.cat((own[None], candidates))).cpu().to(torch.float64)
            told = (sent - sent[0])[None]  # what all candidates share tells nothing; all rounds together are one with less noise
            picked = identify(told, noise_multiplier=self.steps**-0.5, trials=TRIALS, rng=_on_cpu(rng))
            hits.append(float((picked == 0).double().mean()))
        return {"attack": sum(hits) / len(hits), "trials": TRIALS * len(hits)}


def _epsilons(noise_multiplier: float, unit: ProtectedUnit, rate: float, steps: int) -> dict[str, Any]:
    """The ε at δ = 1e-5 of the same rounds, by each accountant; of a client, any other batch may be in its batch's place."""
    found = {}
    for accountant in ACCOUNTANTS:
        multiplier = noise_multiplier / 2 if unit == "client" else noise_multiplier
        try:
            epsilon = gaussian_epsilon(noise_multiplier=multiplier, sample_rate=rate, steps=steps, delta=DELTA, accountant=accountant)
        except Refused:  # Opacus is not installed, or this accountant finds none
            continue
        if math.isfinite(epsilon):
            found[accountant] = epsilon
    return {"epsilon": found, "delta": DELTA} if found else {}


def _on_cpu(rng: Generator) -> Generator:
    return torch.Generator().manual_seed(rng.initial_seed())
