import math

import numpy
import pytest
from scipy import ndimage

import dosimeter as dm
from dosimeter.randomness import generator


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


@pytest.mark.parametrize("sigma", [0.5, 1.3, 4.0])
def test_blur_agrees_with_scipy(client, sigma):
    found = _defended(client, "blur", sigma=sigma).batch.inputs.numpy()
    radius = math.ceil(4 * sigma)
    expected = ndimage.gaussian_filter(client.batch.inputs.numpy(), (0, 0, sigma, sigma), mode="nearest", radius=(0, 0, radius, radius))
    assert numpy.allclose(found, expected, atol=1e-5)


def test_a_negative_sigma_is_refused():
    with pytest.raises(ValueError, match=r"defense\.sigma: expected a finite number of at least 0"):
        dm.defense("blur", sigma=-1.0)
