"""Class-level accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics.insacc import InstanceAccuracy
from dosimeter.registry import METRICS


@METRICS.register("clsacc")
@dataclass(frozen=True, kw_only=True)
class ClassAccuracy(Metric):
    """Classes in common over classes in either: the Jaccard similarity of two sets.

    Zhang, "Unveiling the Shadows" (PhD thesis, PolyU 2025), section 3.6.1: ClsAcc. Unlike LeAcc, absent classes
    do not count.
    """

    surface: ClassVar = "labels"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "ClsAcc"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        return InstanceAccuracy()((recovered > 0).long(), (truth > 0).long())  # (1,), or (N,) for counts (N, C)
