"""Opacus at a client: DP-SGD in its local training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.bounds.reconstruction_robustness import log_ratios
from dosimeter.engines.gaussian_mechanism import exact_epsilon, found_members
from dosimeter.engines.privacy import gaussian_epsilon
from dosimeter.interfaces import PrivacySetting
from dosimeter.options import OptionError
from dosimeter.privacy_settings.ranges import Count, Positive, PositiveOrZero
from dosimeter.registry import PRIVACY
from dosimeter.types import Accountant, PrivacyReading, Refused

FALSE_ALARMS = 0.01
MOST_DRAWS = 2**31  # of a trial, which take about a minute
WHOLE = 1e-9  # how far a number of epochs may lie from a whole one


@PRIVACY.register("opacus_dpsgd")
@dataclass(frozen=True, kw_only=True)
class OpacusDPSGD(PrivacySetting):
    """Opacus' `PrivacyEngine` at a client: every sample's gradient clipped, and noise on their sum, in each local step.

    Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. Read in opacus 1.6.0. The accountant takes each step's samples as a
    Poisson sample. Where the loader is an ordinary shuffled one (`poisson_sampling=False`), that gives no help: a sample is then in one
    step of each epoch, and the exact ε is that of so many Gaussian mechanisms (Balle & Wang, ICML 2018: Theorem 8; Dong, Roth & Su,
    JRSS-B 2022: Corollary 3.3). For the client as a whole, each of its samples moves the sums by up to twice the clipping norm.
    """

    framework: ClassVar[str] = "opacus 1.6.0"
    strengths: ClassVar = ({"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 100},)

    noise_multiplier: PositiveOrZero
    sample_rate: Positive
    steps: Count  # local steps in one round
    poisson_sampling: bool = True
    samples: Count | None = None  # that the client has
    max_grad_norm: Positive | None = None  # ε does not depend on it
    stated: Positive | None = None  # such as the target_epsilon that was typed; None: what Opacus counts
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_rate > 1:
            raise OptionError("sample_rate", f"expected a number in (0, 1], got {self.sample_rate}")

    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        delta = 1e-5 if delta is None else delta
        counted = gaussian_epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps * rounds,
            delta=delta,
            accountant=self.accountant,
        )
        stated = counted if self.stated is None else self.stated
        return (self._of_sample(rounds, delta, stated), self._of_client(rounds, delta))

    def _of_sample(self, rounds: int, delta: float, stated: float) -> PrivacyReading:
        moved = math.sqrt(self._steps_of_a_sample() * rounds) / self.noise_multiplier if self.noise_multiplier else math.inf
        proved, found = exact_epsilon(moved, delta), found_members(FALSE_ALARMS, moved=moved)
        reason = f"a sample is in up to {self._steps_of_a_sample()} steps of a round, and no sampling hides in which"
        if self.poisson_sampling:
            steps = self.steps * rounds
            sampled = gaussian_epsilon(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, steps=steps, delta=delta)
            if sampled < proved:
                proved, reason = (
                    sampled,
                    f"{steps} steps, each on a Poisson sample of {self.sample_rate:.3g} of the data (Rényi accountant)",
                )
                found = min(found, found_members(FALSE_ALARMS, epsilon=proved, delta=delta))
        return PrivacyReading(
            unit="sample",
            change="left out",
            against="the server",
            stated=stated,
            proved=proved,
            delta=delta,
            found=found,
            reason=reason,
        )

    def _of_client(self, rounds: int, delta: float) -> PrivacyReading:
        moved, reason = math.inf, "the number of the client's samples is not said; pass samples"
        if self.samples is not None:
            times = math.sqrt(self._steps_of_a_sample() * rounds)
            moved = 2 * self.samples * times / self.noise_multiplier if self.noise_multiplier else math.inf
            reason = f"{self.samples} samples exchanged move the sums by up to 2 × {self.samples} clipping norms, {times:.3g} times over"
        return PrivacyReading(
            unit="client",
            change="replaced",
            against="the server",
            stated=None,
            proved=exact_epsilon(moved, delta),
            delta=delta,
            found=found_members(FALSE_ALARMS, moved=moved),
            reason=reason,
        )

    def _steps_of_a_sample(self) -> int:
        """In how many steps of a round one sample can be: all of them behind Poisson sampling, one an epoch behind a shuffled loader."""
        return self.steps if self.poisson_sampling else min(self.steps, math.ceil(self.steps * self.sample_rate - WHOLE))

    def trial(self, reading: PrivacyReading, rounds: int, draws: int, rng: Generator) -> tuple[Tensor, Tensor] | None:
        """A sample whose gradient has the clipping norm, in all steps or in none, seen along its gradient after each step."""
        if reading.unit != "sample" or self.noise_multiplier == 0:
            return None
        if not self.poisson_sampling or self.sample_rate == 1:
            times = self._steps_of_a_sample() * rounds
            noise = torch.randn(2, draws, generator=rng, dtype=torch.float64) * self.noise_multiplier * math.sqrt(times)
            return noise[0] + times, noise[1]
        if self.steps * rounds * draws > MOST_DRAWS:
            return None
        setting = (self.noise_multiplier, self.sample_rate, self.steps * rounds, draws, rng)
        return log_ratios(*setting, drawn=True), log_ratios(*setting, drawn=False)

    def caveats(self) -> tuple[str, ...]:
        found = ["what else a client sends, such as its number of examples and buffers, is not protected"]
        if not self.poisson_sampling:
            found.append("Opacus counts steps as Poisson samples, and the loader is not: its ε is not proved")
        return tuple(found)

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (("unmodelled", {}),)

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        if type(thing).__name__ != "PrivacyEngine" or not hasattr(thing, "accountant"):
            return None
        history = list(thing.accountant.history)
        if len(history) != 1:
            raise Refused(f"a PrivacyEngine with {len(history)} kinds of steps in its history; pass opacus_dpsgd with the options of one")
        noise, rate, steps = history[0]
        return {"noise_multiplier": float(noise), "sample_rate": float(rate), "steps": int(steps)}
