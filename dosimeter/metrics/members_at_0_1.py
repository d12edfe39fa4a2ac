"""Members found at 0.1 % false alarms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics.membership_rates import found_at
from dosimeter.registry import METRICS


@METRICS.register("members_at_0_1")
@dataclass(frozen=True, kw_only=True)
class MembersAtOneInAThousand(Metric):
    """Share of the batch's samples that a membership test finds while at most 0.1 % of other samples pass it.

    Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022: the true-positive rate at a low false-positive rate.
    With too few other samples for that rate, none of them passes.
    """

    surface: ClassVar = "membership"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "Members found at 0.1 % false alarms"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    rate: ClassVar[float] = 0.001  # of false alarms

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """Scores (n,) of candidates, and which of them are in the batch (n,) bool -> (1,)."""
        return found_at(self.rate, recovered, truth, self.name)
