"""What a decoder is trained to lower: the squared error, then how far its images look from the true ones."""

from __future__ import annotations

from torch import Tensor

from dosimeter.metrics.lpips import PerceptualSimilarity, perceptual_distance
from dosimeter.metrics.ssim import structural_similarity

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
