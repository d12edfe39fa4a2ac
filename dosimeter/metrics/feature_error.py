"""Relative error of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("feature_error")
@dataclass(frozen=True, kw_only=True)
class FeatureError(Metric):
    """Distance between a recovered feature vector and the true one, in lengths of the true one: ‖f − f*‖ / ‖f*‖.

    The relative error of numerical analysis, for what RGLA and its kin recover. 0 is exact, 1 is what the zero vector gets.
    A true vector of length 0 gives 0 where it was found and infinity where it was not.
    """

    surface: ClassVar = "features"
    higher_is_better: ClassVar[bool] = False

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth)
        recovered, truth = recovered.to(torch.float64), truth.to(torch.float64)
        error, length = (recovered - truth).norm(dim=1), truth.norm(dim=1)  # (B,)
        return torch.where(error == 0, error, error / length)
