"""Structural similarity, against scikit-image with the same window and borders, and against torchmetrics' values."""

import numpy as np
import pytest
import torch
from skimage.data import astronaut
from skimage.metrics import structural_similarity

from dosimeter.registry import METRICS


def reference(recovered, truth, window):
    """scikit-image crops the border that its window overhangs; padding by that much first makes it keep every pixel."""
    margin = window // 2
    padded = [np.pad(image.double().numpy(), ((0, 0), (margin, margin), (margin, margin)), mode="reflect") for image in (recovered, truth)]
    sigma = 1.5 * window / 11
    settings = {"gaussian_weights": True, "sigma": sigma, "use_sample_covariance": False, "data_range": 1.0, "channel_axis": 0}
    return structural_similarity(*padded, win_size=window, **settings)


def photographs(side):
    """Three parts of a photograph, and the same with more and more noise."""
    photograph = torch.from_numpy(astronaut()[100 : 100 + side, 200 : 200 + side]).permute(2, 0, 1) / 255
    truth = torch.stack([photograph, photograph.flip(2), 1 - photograph])
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    return truth + torch.tensor([0.02, 0.1, 0.4]).reshape(3, 1, 1, 1) * noise, truth


# structural_similarity_index_measure(recovered.double(), truth.double(), data_range=1.0, reduction="none") of torchmetrics 1.9
TORCHMETRICS = {
    32: [0.910816355, 0.392494777, 0.056740149],
    16: [0.931725209, 0.471203382, 0.086267158],
    11: [0.959424999, 0.619360101, 0.204919174],
}


@pytest.mark.parametrize("side", list(TORCHMETRICS))
def test_is_torchmetrics_value_where_its_window_fits(side):
    assert METRICS.build("ssim")(*photographs(side)).tolist() == pytest.approx(TORCHMETRICS[side], abs=1e-8)


@pytest.mark.parametrize(("side", "window"), [(32, 11), (11, 11), (10, 9), (9, 9), (8, 7), (5, 5), (4, 3), (3, 3)])
def test_is_scikit_images_value_with_the_largest_window_that_fits(side, window):
    recovered, truth = photographs(side)
    expected = [reference(r, t, window) for r, t in zip(recovered, truth)]
    assert METRICS.build("ssim")(recovered, truth).tolist() == pytest.approx(expected, abs=1e-4)


def test_an_exact_hit_is_one_and_the_pieces_keep_their_order():
    truth = torch.rand(130, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    recovered = truth.clone()
    recovered[100] = 1 - truth[100]
    values = METRICS.build("ssim")(recovered, truth)
    assert values.shape == (130,)
    assert float(values[100]) < 0
    assert torch.cat([values[:100], values[101:]]).tolist() == pytest.approx([1.0] * 129, abs=1e-5)


def test_says_why_it_is_unavailable():
    metric = METRICS.build("ssim")
    assert metric.unavailable() is None
    assert metric.unavailable((1, 3, 3)) is None
    assert "sides of at least 3" in metric.unavailable((1, 2, 9))
    assert "got samples of shape (64,)" in metric.unavailable((64,))
