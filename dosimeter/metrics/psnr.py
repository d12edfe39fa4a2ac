"""Peak signal-to-noise ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics.mse import MeanSquaredError
from dosimeter.options import PositiveFloat
from dosimeter.registry import METRICS


@METRICS.register("psnr")
@dataclass(frozen=True, kw_only=True)
class PeakSignalToNoise(Metric):
    """Peak signal-to-noise ratio of each image, 10 log10(1 / MSE), for pixels in [0, 1].

    Huynh-Thu and Ghanbari, "Scope of validity of PSNR in image/video quality assessment", Electronics Letters 2008.
    Departure: values stop at `cap`, so that an exact recovery has a finite score. Rounding to eight bits alone limits PSNR to
    59 dB, so that all recoveries at the default cap of 100 dB are equally exact.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "PSNR"
    unit: ClassVar[str] = "dB"

    cap: PositiveFloat = 100.0

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        return (-10 * MeanSquaredError()(recovered, truth).log10()).clamp(max=self.cap)  # (B,)
