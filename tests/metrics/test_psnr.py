"""Peak signal-to-noise ratio, against scikit-image and by hand."""

import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio

from dosimeter.options import OptionError
from dosimeter.registry import METRICS


def test_is_scikit_images_value_image_by_image():
    rng = torch.Generator().manual_seed(5)
    truth = torch.rand(4, 3, 9, 8, generator=rng)
    recovered = truth + torch.tensor([0.01, 0.1, 0.3, 1.0]).reshape(4, 1, 1, 1) * torch.randn(4, 3, 9, 8, generator=rng)
    expected = [peak_signal_noise_ratio(t.double().numpy(), r.double().numpy(), data_range=1.0) for r, t in zip(recovered, truth)]
    assert METRICS.build("psnr")(recovered, truth).tolist() == pytest.approx(expected, abs=1e-5)


def test_an_error_of_a_tenth_is_twenty_decibels_and_ten_times_less_is_twenty_more():
    truth = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float64)
    recovered = truth + torch.tensor([0.1, 0.01], dtype=torch.float64).reshape(2, 1, 1, 1)
    assert METRICS.build("psnr")(recovered, truth).tolist() == pytest.approx([20.0, 40.0])


def test_an_exact_hit_is_the_cap_and_one_bad_image_does_not_touch_it():
    truth = torch.full((2, 1, 4, 4), 0.5)
    recovered = torch.stack([truth[0], truth[1] + 0.5])
    assert METRICS.build("psnr")(recovered, truth).tolist() == pytest.approx([100.0, 6.0206], abs=1e-4)
    assert METRICS.build("psnr", cap=60)(recovered, truth).tolist() == pytest.approx([60.0, 6.0206], abs=1e-4)


def test_refuses_a_cap_that_is_not_positive():
    with pytest.raises(OptionError, match=r"metric.cap: expected a positive number"):
        METRICS.build("psnr", cap=-1.0)
