"""What a decoder is trained to lower: the squared error, then how far its images look from the true ones."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from dosimeter.metrics.lpips import PerceptualSimilarity, perceptual_distance

WINDOW, SIGMA = 11, 1.5  # Wang et al. 2004, section III-B
STABILISERS = (0.01**2, 0.03**2)
LEAST_ERROR = 1e-10  # 100 dB


def squared_error(drawn: Tensor, images: Tensor) -> Tensor:
    return (drawn - images).square().mean()


def fine_tuning(drawn: Tensor, images: Tensor, *, perceptual: bool) -> Tensor:
    """RGLA's −PSNR + 10 (1 − SSIM) + 10 LPIPS, each a mean over the images; without LPIPS where `perceptual` is False."""
    decibels = -10 * (drawn - images).square().mean((1, 2, 3)).clamp_min(LEAST_ERROR).log10()
    total = -decibels.mean() + 10 * (1 - structural_similarity(drawn, images).mean())
    return total + 10 * perceptual_distance(drawn, images).mean() if perceptual else total


def perceptual_reason(shape: tuple[int, ...]) -> str | None:
    """Why LPIPS cannot be part of the loss here, or None."""
    return PerceptualSimilarity().unavailable(shape)


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """SSIM of each image, differentiable: (n,). Wang et al., IEEE TIP 2004, Eq. (13), with a window that fits the image."""
    side = min(first.shape[-2:])
    window = min(WINDOW, side - 1 + side % 2)
    kernel = _kernel(window).to(first)
    border = window // 2

    def blurred(images: Tensor) -> Tensor:
        flat = pad(images.flatten(0, 1)[:, None], (border,) * 4, mode="reflect") if window < side else images.flatten(0, 1)[:, None]
        return conv2d(conv2d(flat, kernel[None, None, None, :]), kernel[None, None, :, None])

    mean, other = blurred(first), blurred(second)
    variance, other_variance = blurred(first.square()) - mean.square(), blurred(second.square()) - other.square()
    covariance = blurred(first * second) - mean * other
    small, smaller = STABILISERS
    luminance = (2 * mean * other + small) / (mean.square() + other.square() + small)
    structure = (2 * covariance + smaller) / (variance + other_variance + smaller)
    return (luminance * structure).reshape(len(first), -1).mean(1)


@lru_cache(maxsize=8)
def _kernel(window: int) -> Tensor:
    positions = torch.arange(window, dtype=torch.float64) - window // 2
    weights = torch.exp(-(positions**2) / (2 * (SIGMA * window / WINDOW) ** 2))
    return weights / weights.sum()
