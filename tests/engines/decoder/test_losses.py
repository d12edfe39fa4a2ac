"""The fine-tuning loss, against torchmetrics and by hand."""

import math

import pytest
import torch

from dosimeter.engines.decoder.losses import fine_tuning, perceptual_reason
from dosimeter.metrics.lpips import WEIGHTS_VARIABLE, perceptual_distance
from dosimeter.metrics.ssim import structural_similarity


def test_without_lpips_the_loss_is_minus_psnr_plus_ten_dissimilarities(rng):
    images = torch.rand(4, 3, 16, 16, generator=rng)
    drawn = (images + 0.05 * torch.randn(images.shape, generator=rng)).clamp(0, 1).requires_grad_()
    decibels = sum(10 * math.log10(1 / float((drawn.detach()[i] - images[i]).square().mean())) for i in range(4)) / 4
    similarity = float(structural_similarity(drawn.detach(), images).mean())
    loss = fine_tuning(drawn, images, perceptual=False)
    assert float(loss) == pytest.approx(-decibels + 10 * (1 - similarity), rel=1e-5)
    loss.backward()
    assert drawn.grad.isfinite().all()
    assert float(drawn.grad.abs().max()) > 0


def test_with_lpips_the_loss_has_a_slope_everywhere(shared_data, monkeypatch):
    """Black images leave some of AlexNet's positions dead, where a plain root has an infinite slope."""
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(shared_data / "weights" / "lpips_alex_v0.1_full_fp32.pth"))
    assert perceptual_reason((3, 32, 32)) is None
    drawn = torch.zeros(2, 3, 32, 32, requires_grad=True)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loss = fine_tuning(drawn, images, perceptual=True)
    plain = fine_tuning(drawn, images, perceptual=False)
    assert float(loss - plain) == pytest.approx(10 * float(perceptual_distance(drawn, images).mean()), rel=1e-5)
    loss.backward()
    assert drawn.grad.isfinite().all()


def test_missing_weights_are_told(monkeypatch):
    monkeypatch.setenv(WEIGHTS_VARIABLE, "/nowhere/lpips.pth")
    assert "no such file" in perceptual_reason((3, 32, 32))
