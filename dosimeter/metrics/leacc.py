"""Label existence accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("leacc")
@dataclass(frozen=True, kw_only=True)
class LabelExistenceAccuracy(Metric):
    """Fraction of all classes whose presence or absence in the batch is recovered rightly.

    Ma et al., "Instance-wise Batch Label Restoration", ICLR 2023, section 4: LeAcc. Absent classes count. With many
    classes and a small batch, an empty answer scores high: read LeAcc beside its null and ClsAcc.
    """

    surface: ClassVar = "labels"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "LeAcc"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=1)
        return ((recovered > 0) == (truth > 0)).to(torch.float64).mean(-1).reshape(-1)  # (1,), or (N,) for counts (N, C)
