"""The share of members that any test finds behind clipping and Gaussian noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Generator

from dosimeter.engines.membership.estimate import true_positive_bound
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.metrics.members_at_1 import MembersAtOnePercent
from dosimeter.metrics.membership_rates import allowed_alarms, rate_of
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling, Refused


@BOUNDS.register("membership_tradeoff")
@dataclass(frozen=True, kw_only=True)
class MembershipTradeoff(Bound):
    """Limits the share of members that any test finds at 1 % false alarms, from the clipping norm and the noise alone.

    Dong, Roth & Su, "Gaussian Differential Privacy", JRSS-B 2022: the trade-off function of the Gaussian mechanism. Another sample stands
    in the member's place, which moves the sum by up to twice the clipping norm.
    An audit counts false alarms among N other samples. By chance, a sample is above all but k of them with probability
    (k + 1)/(N + 1), and the audit's ceiling is for that.
    """

    surface: ClassVar[str] = "membership"
    metric: ClassVar[str] = "members_at_1"

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        multiplier = mechanism.noise_multipliers.get("sample", mechanism.noise_multipliers.get("client"))
        if multiplier is None:
            raise Refused("membership_tradeoff needs Gaussian noise on a clipped update: dpsgd, or clipping by norm before gaussian_noise")
        bound = true_positive_bound(MembersAtOnePercent.rate, noise_multiplier=multiplier)
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.full((len(mechanism.client.batch.inputs),), bound.high, dtype=torch.float64),
            proved=True,
            assumptions=(
                "The attacker knows all other samples, and asks of one sample whether it or another one is in the batch.",
                "The value is a mean over the noise; of few members a single update may show more.",
                "The update is sent once.",
            ),
            details={"noise_multiplier": multiplier},
        )

    def as_measured(self, ceiling: Ceiling, details: Mapping[str, Any]) -> Ceiling:
        """At the false alarms that few other samples stand for, which are more than the share of them that passes."""
        others, multiplier = details.get("others"), ceiling.details["noise_multiplier"]
        if not isinstance(others, int) or others < 1:
            return ceiling
        rate = rate_of(allowed_alarms(MembersAtOnePercent.rate, others), others)
        bound = true_positive_bound(max(rate, MembersAtOnePercent.rate), noise_multiplier=multiplier)
        return replace(ceiling, values=torch.full_like(ceiling.values, bound.high), details={**ceiling.details, "false_alarms": rate})
