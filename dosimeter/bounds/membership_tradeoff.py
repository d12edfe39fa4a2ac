"""The share of members that any test finds behind clipping and Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from dosimeter.engines.membership.estimate import true_positive_bound
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.metrics.members_at_1 import MembersAtOnePercent
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling, Refused


@BOUNDS.register("membership_tradeoff")
@dataclass(frozen=True, kw_only=True)
class MembershipTradeoff(Bound):
    """Limits the share of members that any test finds at 1 % false alarms, from the clipping norm and the noise alone.

    Dong, Roth & Su, "Gaussian Differential Privacy", JRSS-B 2022: the trade-off function of the Gaussian mechanism. Another sample stands
    in the member's place, which moves the sum by up to twice the clipping norm.
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
