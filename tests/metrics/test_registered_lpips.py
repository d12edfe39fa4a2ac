"""LPIPS of registered pictures."""

from pathlib import Path

import pytest
import torch

from dosimeter.metrics.lpips import WEIGHTS_VARIABLE, PerceptualSimilarity, perceptual_distance, perceptual_distances
from dosimeter.metrics.registered_lpips import RegisteredPerceptualSimilarity

WEIGHTS = Path(__file__).resolve().parents[3] / "shared/data/weights/lpips_alex_v0.1_full_fp32.pth"


@pytest.fixture
def pictures(monkeypatch):
    if not WEIGHTS.is_file():
        pytest.skip(f"needs the LPIPS weights in {WEIGHTS}")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(WEIGHTS))
    coarse = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    return torch.nn.functional.interpolate(coarse, size=(48, 48), mode="bilinear")


def test_a_shift_costs_little_and_the_metric_never_exceeds_lpips(pictures):
    moved = torch.roll(pictures, (7, -5), (2, 3)).flip(3)
    plain, registered = PerceptualSimilarity()(moved, pictures), RegisteredPerceptualSimilarity()(moved, pictures)
    assert (registered < 0.5 * plain).all()
    noise = torch.rand(pictures.shape, generator=torch.Generator().manual_seed(4))
    assert (RegisteredPerceptualSimilarity()(noise, pictures) <= PerceptualSimilarity()(noise, pictures)).all()
    assert RegisteredPerceptualSimilarity()(pictures, pictures).abs().max() < 1e-6


def test_all_pairs_equal_the_pairs_one_by_one(pictures):
    every = perceptual_distances(pictures[:2], pictures)
    alone = torch.stack([perceptual_distance(pictures[i : i + 1].expand(4, -1, -1, -1), pictures) for i in range(2)])
    torch.testing.assert_close(every, alone, rtol=1e-4, atol=1e-6)


def test_without_weights_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path / "none.pth"))
    assert "no such file of LPIPS weights" in str(RegisteredPerceptualSimilarity().unavailable((3, 32, 32)))
