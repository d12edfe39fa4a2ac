"""Cosine of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("feature_cosine")
@dataclass(frozen=True, kw_only=True)
class FeatureCosine(Metric):
    """Cosine of the angle between a recovered feature vector and the true one.

    The cosine similarity of Salton's vector space model, and feature_error without the scale. Features of an untrained network
    are nearly parallel, so that a cosine near 1 means little without its null. A zero vector scores 0.
    """

    surface: ClassVar = "features"
    higher_is_better: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth)
        return torch.cosine_similarity(recovered.to(torch.float64), truth.to(torch.float64), dim=1, eps=1e-30)  # (B,)
