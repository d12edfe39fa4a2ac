"""L1 error of soft labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("label_l1")
@dataclass(frozen=True, kw_only=True)
class LabelL1(Metric):
    """Sum over classes of the absolute error of a soft label.

    0 is exact; 2 puts all mass on wrong classes. The published test of soft labels (Wang et al., "Towards Eliminating Hard
    Label Constraints in Gradient Inversion Attacks", ICLR 2024) uses the attack's true inner scalar; this metric needs the label alone.
    """

    surface: ClassVar = "labels"
    higher_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "label L1 error"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth)
        return (recovered.to(torch.float64) - truth.to(torch.float64)).abs().sum(1)  # (B,)
