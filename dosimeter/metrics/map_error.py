"""Relative error of activation maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("map_error")
@dataclass(frozen=True, kw_only=True)
class MapError(Metric):
    """Distance between the recovered activation maps of a sample and the true ones, in lengths of the true ones: ‖a − a*‖ / ‖a*‖.

    The relative error of numerical analysis, over all channels and positions of one layer. 0 is exact, 1 is what zeros get.
    True maps of length 0 give 0 where they were found and infinity where they were not.
    """

    surface: ClassVar = "maps"
    higher_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "map error"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth)
        recovered, truth = recovered.flatten(1).to(torch.float64), truth.flatten(1).to(torch.float64)
        error, length = (recovered - truth).norm(dim=1), truth.norm(dim=1)  # (B,)
        return torch.where(error == 0, error, error / length)
