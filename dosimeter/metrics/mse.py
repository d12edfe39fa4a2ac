"""Mean squared error of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("mse")
@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(Metric):
    """Mean squared difference of an image's pixels.

    Gauss's measure, on pixels in [0, 1]. Each image has its own value, since a mean over the batch would hide single good or
    bad images.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "MSE"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth)
        return (recovered - truth).to(torch.float64).square().flatten(1).mean(1)  # (B,)
