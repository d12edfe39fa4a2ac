"""Pixels to inputs and back, channel by channel."""

import pytest
import torch

from dosimeter.normalization import from_pixels, input_bounds, to_pixels
from dosimeter.types import Normalization

COLOUR = Normalization(mean=(0.5, 0.25), std=(0.5, 0.125))


def test_inputs_are_pixels_less_the_mean_over_the_deviation():
    pixels = torch.tensor([[[[0.0, 1.0]], [[0.25, 0.5]]]])
    inputs = from_pixels(pixels, COLOUR)
    assert inputs.tolist() == [[[[-1.0, 1.0]], [[0.0, 2.0]]]]
    assert torch.equal(to_pixels(inputs, COLOUR), pixels)


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 5), (3, 2, 4, 4)])
def test_there_and_back_is_the_same_in_any_shape(shape, rng):
    pixels = torch.rand(shape, generator=rng, dtype=torch.float64)
    inputs = from_pixels(pixels, COLOUR)
    assert inputs.dtype == torch.float64
    torch.testing.assert_close(to_pixels(inputs, COLOUR), pixels)
    low, high = input_bounds(COLOUR, inputs)
    assert bool(((inputs >= low) & (inputs <= high)).all())
    assert torch.equal(low.expand(shape), from_pixels(torch.zeros_like(pixels), COLOUR))
    assert torch.equal(high.expand(shape), from_pixels(torch.ones_like(pixels), COLOUR))


def test_one_mean_stands_for_all_channels_and_a_wrong_number_is_refused():
    pixels = torch.rand(2, 3, 4, 4)
    assert torch.equal(from_pixels(pixels, Normalization(std=(0.5,))), 2 * pixels)
    with pytest.raises(RuntimeError, match="must match"):
        from_pixels(pixels, COLOUR)
