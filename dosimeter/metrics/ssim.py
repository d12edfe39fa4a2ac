"""Structural similarity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS

WINDOW = 11  # pixels, with a Gaussian of σ = 1.5 (Wang et al., section III-B)
SMALLEST_SIDE = 3  # pixels: smaller windows see no structure
STABILISERS = (0.01**2, 0.03**2)
IMAGES_AT_ONCE = 64  # images at a time


@METRICS.register("ssim")
@dataclass(frozen=True, kw_only=True)
class StructuralSimilarity(Metric):
    """Structural similarity of each image: luminance, contrast and structure in a sliding Gaussian window.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE TIP 2004: Eq. (13) with
    K = (.01, .03). As in torchmetrics, borders are reflected and the value is the mean over all pixels and channels. It needs
    PyTorch alone, so it runs where nothing else is installed. It is differentiable, since decoders are trained with it.
    Departure: an image with a side below 11 pixels takes the largest odd window that fits, with σ shrunk in proportion.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "SSIM"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=4)
        pieces = zip(recovered.split(IMAGES_AT_ONCE), truth.split(IMAGES_AT_ONCE))
        # In double precision, since a variance is a difference of squares.
        return torch.cat([structural_similarity(first.double(), second.double()) for first, second in pieces])  # (B,)

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        if shape is not None and (len(shape) != 3 or min(shape[1:]) < SMALLEST_SIDE):
            return f"needs images (channels, height, width) with sides of at least {SMALLEST_SIDE}, got samples of shape {shape}"
        return None


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Eq. (13) of each image, differentiable, with pixels in [0, 1]: (n,)."""
    side = min(first.shape[2:])
    window = min(WINDOW, side - 1 + side % 2)  # the largest odd one that is neither past the image nor past 11
    kernel = _gaussian(window, 1.5 * window / WINDOW).to(first)

    def blur(images: Tensor) -> Tensor:
        framed = pad(images.flatten(0, 1)[:, None], (window // 2,) * 4, mode="reflect")
        return conv2d(conv2d(framed, kernel[None, None, None, :]), kernel[None, None, :, None])  # (n channels, 1, height, width)

    mean, other = blur(first), blur(second)
    variance, other_variance = blur(first.square()) - mean.square(), blur(second.square()) - other.square()
    covariance = blur(first * second) - mean * other
    luminance = (2 * mean * other + STABILISERS[0]) / (mean.square() + other.square() + STABILISERS[0])
    structure = (2 * covariance + STABILISERS[1]) / (variance + other_variance + STABILISERS[1])
    return (luminance * structure).reshape(len(first), -1).mean(1)


def _gaussian(window: int, sigma: float) -> Tensor:
    positions = torch.arange(window, dtype=torch.float64) - window // 2
    weights = torch.exp(-positions.square() / (2 * sigma**2))
    return weights / weights.sum()
