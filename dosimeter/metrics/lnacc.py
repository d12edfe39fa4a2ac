"""Label number accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("lnacc")
@dataclass(frozen=True, kw_only=True)
class LabelNumberAccuracy(Metric):
    """Fraction of all classes whose number of samples is exact.

    Ma et al., "Instance-wise Batch Label Restoration", ICLR 2023, section 4: LnAcc. Absent classes count too.
    """

    surface: ClassVar = "labels"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "LnAcc"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=1)
        return (recovered == truth).to(torch.float64).mean(-1).reshape(-1)  # (1,), or (N,) for counts (N, C)
