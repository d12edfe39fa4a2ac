"""Relative error of a regression's targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("target_error")
@dataclass(frozen=True, kw_only=True)
class TargetError(Metric):
    """Distance between a recovered target and the true one, in lengths of the true one: ‖t − t*‖ / ‖t*‖.

    The relative error of numerical analysis. 0 is exact, 1 is what a target of zero gets. A true target of zero gives 0 where it was found
    and infinity where it was not.
    """

    surface: ClassVar = "targets"
    higher_is_better: ClassVar[bool] = False

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth)
        recovered, truth = recovered.to(torch.float64).flatten(1), truth.to(torch.float64).flatten(1)
        error, length = (recovered - truth).norm(dim=1), truth.norm(dim=1)  # (B,)
        return torch.where(error == 0, error, error / length)
