"""Flower's strategies for central differential privacy with a clipping norm that adapts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dosimeter.engines.gaussian_mechanism import exact_epsilon, found_members
from dosimeter.interfaces import PrivacySetting
from dosimeter.options import Fraction, OptionError
from dosimeter.privacy_settings.flower_fixed_clipping import FALSE_ALARMS, caveats_of, open_to_server
from dosimeter.privacy_settings.ranges import Count, Positive, PositiveOrZero
from dosimeter.registry import PRIVACY
from dosimeter.types import PrivacyReading, ProtectedUnit

BEYOND = 12.0  # deviations that the noise on the count does not exceed, but with the probability below
TAIL = 2e-33
TAIL_SHARE = 1e-6  # of δ, for the rounds in which it does
MOST_ROUNDS = 10**6
COUNT_SHARE = 20  # Flower's default: the noise on the count is n/20


@PRIVACY.register("flower_adaptive_clipping")
@dataclass(frozen=True, kw_only=True)
class FlowerAdaptiveClipping(PrivacySetting):
    """Flower's `DifferentialPrivacy…AdaptiveClipping`: noise on the mean, with a norm that follows a noisy count of clipped clients.

    Read in flwr 1.41.0, serverapp/strategy/dp_adaptive_clipping.py; Andrew et al., "Differentially Private Learning with Adaptive
    Clipping", NeurIPS 2021: Theorem 1 splits the noise multiplier z between the mean, (z⁻² − (2σ_b)⁻²)^−½, and the count, σ_b.
    Flower departs from it twice. It sends counts of 0 and 1 where the paper has ±½, so that a client who is left out moves the count by 1.
    And it scales a round's noise with the norm of the *next* round, which is smaller where many clients were clipped, while the updates
    were clipped at the larger one. The proof here takes the smallest factor that noise on the count allows. Exact ε as in
    `flower_fixed_clipping`.
    """

    framework: ClassVar[str] = "flwr 1.41.0"
    strengths: ClassVar = ({"noise_multiplier": 1.0, "num_sampled_clients": 100, "largest_share": 0.01},)

    noise_multiplier: PositiveOrZero
    num_sampled_clients: Count
    clip_norm_lr: Positive = 0.2
    target_clipped_quantile: Fraction = 0.5
    clipped_count_stddev: PositiveOrZero | None = None
    clipped_by: Literal["server", "client"] = "server"
    largest_share: Fraction | None = None  # the most that one client weighs in the mean; None: nobody knows, so all of it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier > 0 and self.noise_multiplier >= 2 * self.count_deviation:
            raise OptionError("noise_multiplier", f"expected less than twice the noise on the count, {2 * self.count_deviation:g}")

    @property
    def count_deviation(self) -> float:
        return self.num_sampled_clients / COUNT_SHARE if self.clipped_count_stddev is None else self.clipped_count_stddev

    @property
    def multiplier_of_mean(self) -> float:
        if self.noise_multiplier == 0:
            return 0.0
        return (self.noise_multiplier**-2 - (2 * self.count_deviation) ** -2) ** -0.5

    @property
    def least_factor(self) -> float:
        """The next round's norm over this round's, where all clients were clipped and the noise adds to them."""
        most = 1 + BEYOND * self.count_deviation / self.num_sampled_clients
        return min(1.0, math.exp(-self.clip_norm_lr * (most - self.target_clipped_quantile)))

    def moved(self, rounds: int, times: int = 1) -> float:
        """By how many deviations what all rounds show is moved; `times` is 2 where the client's update is exchanged for another."""
        noise = self.multiplier_of_mean * self.least_factor / self.num_sampled_clients
        if noise == 0 or self.count_deviation == 0:
            return math.inf
        share = 1.0 if self.largest_share is None else self.largest_share
        return math.sqrt(rounds) * math.hypot(times * share / noise, 1 / self.count_deviation)

    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        delta = 1e-5 if delta is None else delta
        if rounds > MOST_ROUNDS:
            raise OptionError("rounds", f"expected at most {MOST_ROUNDS}, got {rounds}")
        why = f"noise that may be {self.least_factor:.3g} of what the norm asks for, since Flower takes the next round's norm"
        if self.largest_share is None:
            why += "; clients may weigh anything, since largest_share is not said"
        neighbours: tuple[tuple[ProtectedUnit, Literal["replaced", "left out"], int], ...] = (
            ("client", "left out", 1),
            ("sample", "replaced", 2),
        )
        others = [
            PrivacyReading(
                unit=unit,
                change=change,
                against="whoever sees the global models",
                stated=None,
                proved=_epsilon(self.moved(rounds, times), rounds, delta),
                delta=delta,
                found=min(1.0, found_members(FALSE_ALARMS, moved=self.moved(rounds, times)) + rounds * TAIL),
                reason=why,
            )
            for unit, change, times in neighbours
        ]
        return (open_to_server(self.clipped_by, None, delta), *others)

    def caveats(self) -> tuple[str, ...]:
        lowers = "Flower lowers the norm where more clients than the target are clipped, so that still more are clipped next"
        return (*caveats_of(self.clipped_by), lowers)

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (("unmodelled", {}),) if self.clipped_by == "client" else ()  # by a norm of its own in each round

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        sides = {f"DifferentialPrivacy{side.capitalize()}SideAdaptiveClipping": side for side in ("server", "client")}
        if type(thing).__name__ not in sides:
            return None
        of_mean, count = float(thing.noise_multiplier), float(thing.clipped_count_stddev)
        return {
            "noise_multiplier": (of_mean**-2 + (2 * count) ** -2) ** -0.5 if of_mean > 0 else 0.0,
            "num_sampled_clients": int(thing.num_sampled_clients),
            "clip_norm_lr": float(thing.clip_norm_lr),
            "target_clipped_quantile": float(thing.target_clipped_quantile),
            "clipped_count_stddev": count,
            "clipped_by": sides[type(thing).__name__],
        }


def _epsilon(moved: float, rounds: int, delta: float) -> float:
    """The exact ε, with a share of δ for rounds in which the noise on the count is beyond `BEYOND`."""
    epsilon = exact_epsilon(moved, (1 - TAIL_SHARE) * delta)
    lost = (1 + math.exp(min(epsilon, 700.0))) * rounds * TAIL
    return epsilon if lost <= TAIL_SHARE * delta else math.inf
