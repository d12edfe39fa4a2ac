"""NVIDIA FLARE's filter by the sparse vector technique."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.gaussian_mechanism import found_members
from dosimeter.engines.sparse_vector import release_epsilon, selection_epsilon, split_budget
from dosimeter.interfaces import PrivacySetting
from dosimeter.numbers import significant
from dosimeter.options import Fraction, OptionError
from dosimeter.privacy_settings.ranges import Count, Positive, PositiveOrZero
from dosimeter.registry import PRIVACY
from dosimeter.types import PrivacyReading

FALSE_ALARMS = 0.01
MOST_DRAWS = 2**31  # of a trial, which take about a minute
SEEN_ENTRIES = 200  # that a trial looks at; to look at fewer than are sent shows less, and is as valid


@PRIVACY.register("nvflare_svt")
@dataclass(frozen=True, kw_only=True)
class NVFlareSVT(PrivacySetting):
    """NVIDIA FLARE's `SVTPrivacy`: sends a share of the entries, chosen above a noisy threshold, with Laplace noise.

    Read in nvflare 2.9.0, app_common/filters/svt_privacy.py; Lyu, Su & Li, "Understanding the Sparse Vector Technique for Differential
    Privacy", PVLDB 2017: Algorithm 7. The typed `epsilon` is spent on choosing alone. Sending costs `epsilon_release`, or where that is
    not said, noise_var for each of the c = fraction · parameters entries: the filter's own log adds it.
    Departure of the filter from Algorithm 7: it does not stop after c entries above the threshold. It looks at all of them, passes again
    over those below until there are c, and sends c of those that it found. The choice then costs up to ε₁ + ε₂ / fraction.
    """

    framework: ClassVar[str] = "nvflare 2.9.0"
    strengths: ClassVar = ({"parameters": 1000},)

    parameters: Count  # entries of all tensors
    fraction: Fraction = 0.1
    epsilon: Positive = 0.1
    noise_var: Positive = 0.1
    gamma: Positive = 1e-5
    tau: PositiveOrZero = 1e-6
    replace: bool = True
    epsilon_threshold: Positive | None = None
    epsilon_query: Positive | None = None
    epsilon_release: Positive | None = None
    scalars: bool = False  # whether tensors without dimensions are sent, such as batch norm's count of batches

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold, queries = self.choice()
        if threshold <= 0 or queries <= 0 or not math.isclose(threshold + queries, self.epsilon, rel_tol=1e-5):
            raise OptionError("epsilon_threshold", f"expected that it and epsilon_query add up to epsilon = {self.epsilon:g}")

    @property
    def sent(self) -> int:
        """How many entries are sent: c."""
        return min(math.ceil(self.parameters * self.fraction), self.parameters)

    @property
    def release(self) -> float:
        return self.sent * self.noise_var if self.epsilon_release is None else self.epsilon_release

    def choice(self) -> tuple[float, float]:
        """ε of the threshold and of the queries."""
        threshold, queries = self.epsilon_threshold, self.epsilon_query
        if threshold is None:
            threshold = split_budget(self.epsilon, max(1, self.sent))[0] if queries is None else self.epsilon - queries
        return threshold, self.epsilon - threshold if queries is None else queries

    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        if self.sent == 0:
            proved, why = 0.0, "nothing is sent"
        else:
            threshold, queries = self.choice()
            chosen = selection_epsilon(threshold, queries, self.sent, positives=self.parameters)
            counted = self.epsilon + self.release
            proved = rounds * (chosen + release_epsilon(2 * self.gamma * self.sent / self.release, self.gamma, self.sent))
            why = f"{significant(chosen)} for the choice and {significant(self.release)} for sending {self.sent} entries, each round"
            why += f"; the filter's log counts {significant(counted)}"
        if self.scalars:
            proved, why = math.inf, "tensors without dimensions pass as they are"
        both = {
            "change": "replaced",
            "against": "the server",
            "stated": self.epsilon,
            "proved": proved,
            "delta": 0.0,
            "found": found_members(FALSE_ALARMS, epsilon=proved),
        }
        return (
            PrivacyReading(unit="client", reason=why, **both),
            PrivacyReading(unit="sample", reason=f"one sample may change every entry, so no more holds: {why}", **both),
        )

    def trial(self, reading: PrivacyReading, rounds: int, draws: int, rng: Generator) -> tuple[Tensor, Tensor] | None:
        """Two updates at opposite ends of the clipping range: the same entries are chosen, and the values tell them apart."""
        if reading.unit != "client" or self.sent == 0 or SEEN_ENTRIES * rounds * draws > MOST_DRAWS:
            return None
        scale = 2 * self.sent / self.release  # of the noise, over gamma
        total = torch.zeros(2, draws, dtype=torch.float64)
        for _ in range(min(SEEN_ENTRIES, self.sent) * rounds):
            pair = torch.empty(2, 2, draws, dtype=torch.float64).exponential_(generator=rng)
            value = scale * (pair[0] - pair[1]) + torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
            total += ((value + 1).abs() - (value - 1).abs()) / scale
        return total[0], total[1]

    def caveats(self) -> tuple[str, ...]:
        found = ["the number of local steps travels with the update and is not protected"]
        return (*found, "the noise is of floating-point numbers, whose last digits can tell more than real numbers do")

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (("unmodelled", {}),)

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        if type(thing).__name__ != "SVTPrivacy":
            return None
        names = ("fraction", "epsilon", "noise_var", "gamma", "tau", "replace", "epsilon_threshold", "epsilon_query", "epsilon_release")
        return {name: getattr(thing, name) for name in names if getattr(thing, name) is not None}
