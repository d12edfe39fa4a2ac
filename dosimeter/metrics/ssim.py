"""Structural similarity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS

WINDOW = 11  # pixels, with a Gaussian of σ = 1.5 (Wang et al., section III-B)
SMALLEST = 3  # the least side on which a window still sees structure
PIECE = 64  # images at a time


@METRICS.register("ssim")
@dataclass(frozen=True, kw_only=True)
class StructuralSimilarity(Metric):
    """Structural similarity of each image: luminance, contrast and structure in a sliding Gaussian window.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE TIP 2004: Eq. (13) with
    K = (.01, .03), as torchmetrics computes it (reflected borders, mean over all pixels and channels).
    Departure: images with a side below 11 take the largest odd window that fits, its σ shrunk in proportion.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        from torchmetrics.functional.image import structural_similarity_index_measure

        check_paired(self.name, recovered, truth, dimensions=4)
        sigma = _sigma(min(truth.shape[2:]))
        values = [
            structural_similarity_index_measure(*piece, sigma=sigma, data_range=1.0, reduction="none")
            for piece in zip(recovered.split(PIECE), truth.split(PIECE))
        ]
        return torch.cat([piece.reshape(-1) for piece in values if isinstance(piece, Tensor)])  # (B,)

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        try:
            import torchmetrics.functional.image  # noqa: F401
        except (ImportError, RuntimeError, OSError) as error:  # a torchvision that does not fit torch breaks it with RuntimeError
            return f"torchmetrics cannot be imported ({error})"
        if shape is not None and (len(shape) != 3 or min(shape[1:]) < SMALLEST):
            return f"needs images (channels, height, width) with sides of at least {SMALLEST}, got samples of shape {shape}"
        return None


def _sigma(side: int) -> float:
    """The σ whose window, 2·⌊3.5 σ + ½⌋ + 1 in torchmetrics, is the largest odd one that is neither past `side` nor past 11."""
    window = min(WINDOW, side - 1 + side % 2)
    return 1.5 * window / WINDOW
