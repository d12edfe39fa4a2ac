"""Perceptual distance of pictures that may be shifted or mirrored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.metrics.lpips import PerceptualSimilarity
from dosimeter.metrics.registration import register
from dosimeter.registry import METRICS


@METRICS.register("registered_lpips")
@dataclass(frozen=True, kw_only=True)
class RegisteredPerceptualSimilarity(Metric):
    """LPIPS after the recovered picture is laid over the true one: shifts of up to a quarter and mirroring cost nothing.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018: Eq. (1). The registration is
    ours: gradients of convolutional networks leave the place of an object open, and matching attacks return shifted pictures.
    The smaller of both distances counts, so that the metric never exceeds LPIPS. Its nulls are registered too.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "LPIPS, registered"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=4)
        distance = PerceptualSimilarity()
        return torch.minimum(distance(recovered, truth), distance(register(recovered, truth), truth))  # (B,)

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        return PerceptualSimilarity().unavailable(shape)
