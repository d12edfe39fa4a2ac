"""Mean squared error: one value an image, against numpy."""

import numpy as np
import pytest
import torch

from dosimeter.registry import METRICS


def test_is_numpys_mean_of_squares_image_by_image():
    recovered, truth = torch.rand(2, 5, 3, 6, 7, generator=torch.Generator().manual_seed(3))
    expected = [np.mean((a.double().numpy() - b.double().numpy()) ** 2) for a, b in zip(recovered, truth)]
    assert METRICS.build("mse")(recovered, truth).tolist() == pytest.approx(expected, rel=1e-6)


def test_takes_vectors_and_survives_a_diverged_attack():
    truth = torch.zeros(2, 4)
    recovered = torch.tensor([[1.0, 1, 1, 3], [1e30, 0, 0, 0]])
    assert METRICS.build("mse")(recovered, truth).tolist() == pytest.approx([3.0, 2.5e59])


def test_refuses_to_broadcast():
    with pytest.raises(ValueError, match="mse: expected as many recovered rows"):
        METRICS.build("mse")(torch.zeros(1, 3), torch.zeros(2, 3))
