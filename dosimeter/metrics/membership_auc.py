"""Area under the curve of a membership test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("membership_auc")
@dataclass(frozen=True, kw_only=True)
class MembershipArea(Metric):
    """How often a sample of the batch looks more like a member than another sample does; a tie counts half.

    Mann and Whitney, Ann. Math. Stat. 1947: the area under the curve of members found over false alarms. Guessing gets a half.
    """

    surface: ClassVar = "membership"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "Area under the curve"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """Scores (n,) of candidates, and which of them are in the batch (n,) bool -> (1,)."""
        check_paired(self.name, recovered, truth, dimensions=1)
        lowest = torch.finfo(torch.float64).min
        members, others = (recovered[chosen].double().nan_to_num(nan=lowest, neginf=lowest) for chosen in (truth, ~truth))
        wins = (members[:, None] > others).double() + 0.5 * (members[:, None] == others).double()
        return wins.mean().reshape(1)
