"""Instance-level accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("insacc")
@dataclass(frozen=True, kw_only=True)
class InstanceAccuracy(Metric):
    """Labels in common over labels in either, repeats counted: the Jaccard similarity of two multisets.

    Zhang, "Unveiling the Shadows" (PhD thesis, PolyU 2025), section 3.6.1: InsAcc. In counts: Σ min(n, n*) / Σ max(n, n*).
    """

    surface: ClassVar = "labels"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "InsAcc"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=1)
        common = torch.minimum(recovered, truth).sum(-1).to(torch.float64)
        either = torch.maximum(recovered, truth).sum(-1).to(torch.float64)
        return torch.where(either == 0, 1.0, common / either).reshape(-1)  # (1,), or (N,) for counts (N, C)
