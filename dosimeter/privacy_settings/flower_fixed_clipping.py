"""Flower's strategies for central differential privacy with a fixed clipping norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.engines.gaussian_mechanism import exact_epsilon, found_members
from dosimeter.interfaces import PrivacySetting
from dosimeter.options import Fraction
from dosimeter.privacy_settings.ranges import Count, Positive, PositiveOrZero
from dosimeter.registry import PRIVACY
from dosimeter.types import PrivacyReading, ProtectedUnit

FALSE_ALARMS = 0.01
UNPROTECTED = {
    "server": "clients send their updates as they are; the server clips them, and adds noise to the mean alone",
    "client": "clients send clipped updates without noise; the server adds noise to the mean alone",
}


def open_to_server(clipped_by: str, stated: float | None, delta: float) -> PrivacyReading:
    """What the server itself learns: all of it."""
    return PrivacyReading(
        unit="client",
        change="left out",
        against="the server",
        stated=stated,
        proved=math.inf,
        delta=delta,
        found=1.0,
        reason=UNPROTECTED[clipped_by],
    )


def caveats_of(clipped_by: str) -> tuple[str, ...]:
    found = ["metrics that clients send, such as their numbers of examples, are not protected, and the mean is weighed by them"]
    if clipped_by == "client":
        found.append("the mods at the clients must run: the server cannot see whether an update was clipped")
    return tuple(found)


@PRIVACY.register("flower_fixed_clipping")
@dataclass(frozen=True, kw_only=True)
class FlowerFixedClipping(PrivacySetting):
    """Flower's `DifferentialPrivacy…FixedClipping`: noise on the mean of clipped updates, against those who see the global model.

    Read in flwr 1.41.0, serverapp/strategy/dp_fixed_clipping.py and supercore/differential_privacy.py; McMahan et al., "Learning
    Differentially Private Recurrent Language Models", ICLR 2018. The mean of the n clipped updates gets noise of
    noise_multiplier · clipping_norm / n, as if each client weighed 1/n. `FedAvg` weighs clients by their examples: one with the share w of
    all examples moves the mean by w · clipping_norm. The exact ε over all rounds is that of the Gaussian mechanism (Balle & Wang, ICML
    2018: Theorem 8; Dong, Roth & Su, JRSS-B 2022: Corollary 3.3), without help from sampling.
    """

    framework: ClassVar[str] = "flwr 1.41.0"
    strengths: ClassVar = ({"noise_multiplier": 1.0, "clipping_norm": 1.0, "num_sampled_clients": 10, "largest_share": 0.1},)

    noise_multiplier: PositiveOrZero
    clipping_norm: Positive
    num_sampled_clients: Count
    clipped_by: Literal["server", "client"] = "server"
    largest_share: Fraction | None = None  # the most that one client weighs in the mean; None: nobody knows, so all of it
    stated: Positive | None = None  # the ε of a budget, such as the accountant's max_epsilon

    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        delta = 1e-5 if delta is None else delta
        why = (
            f"against a client whose update is zero at the same weight, which is up to {self.share:.3g}; noise {self.noise:.3g} of the norm"
        )
        if self.largest_share is None:
            why += "; clients may weigh anything, since largest_share is not said"
        turned = f"one sample may turn its client's update round, which moves the mean twice as far: {why}"
        neighbours: tuple[tuple[ProtectedUnit, Literal["replaced", "left out"], float, str], ...] = (
            ("client", "left out", self.moved(rounds), why),
            ("sample", "replaced", 2 * self.moved(rounds), turned),
        )
        others = [
            PrivacyReading(
                unit=unit,
                change=change,
                against="whoever sees the global models",
                stated=self.stated,
                proved=exact_epsilon(moved, delta),
                delta=delta,
                found=found_members(FALSE_ALARMS, moved=moved),
                reason=reason,
            )
            for unit, change, moved, reason in neighbours
        ]
        return (open_to_server(self.clipped_by, self.stated, delta), *others)

    @property
    def share(self) -> float:
        return 1.0 if self.largest_share is None else self.largest_share

    @property
    def noise(self) -> float:
        """The noise's deviation over the clipping norm."""
        return self.noise_multiplier / self.num_sampled_clients

    def moved(self, rounds: int) -> float:
        """By how many deviations of the noise a client's update moves what all rounds show."""
        return math.sqrt(rounds) * self.share / self.noise if self.noise > 0 else math.inf

    def trial(self, reading: PrivacyReading, rounds: int, draws: int, rng: Generator) -> tuple[Tensor, Tensor] | None:
        """The heaviest client's update at the clipping norm, or none, in a mean of updates that are known."""
        if reading.unit != "client" or reading.against == "the server":
            return None
        noise = torch.randn(2, draws, generator=rng, dtype=torch.float64) * self.noise * math.sqrt(rounds)
        return noise[0] + rounds * self.share, noise[1]

    def caveats(self) -> tuple[str, ...]:
        return caveats_of(self.clipped_by)

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (("clipping", {"max_norm": self.clipping_norm / unit}),) if self.clipped_by == "client" else ()

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        sides = {f"DifferentialPrivacy{side.capitalize()}SideFixedClipping": side for side in ("server", "client")}
        if type(thing).__name__ not in sides:
            return None
        accountant = getattr(thing, "accountant", None)
        options: dict[str, Any] = {name: float(getattr(thing, name)) for name in ("noise_multiplier", "clipping_norm")}
        options |= {"num_sampled_clients": int(thing.num_sampled_clients), "clipped_by": sides[type(thing).__name__]}
        if accountant is not None:  # with it, Flower refuses replies of unequal weight
            options |= {"largest_share": 1 / options["num_sampled_clients"], "stated": accountant.config.max_epsilon}
        return options
