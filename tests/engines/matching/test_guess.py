"""Where a guess begins."""

import pytest
import torch
from torch import Generator

import dosimeter as dm
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.guess import Guess, draw_start
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.recipe import Recipe, Start
from dosimeter.engines.matching.schedules import Rate
from dosimeter.normalization import input_bounds


def drawn(start: Start) -> torch.Tensor:
    """Two restarts of 40 samples of 3 x 16 x 16, in pixels between 0 and 1."""
    low, high = input_bounds(dm.Normalization(), torch.zeros(40, 3, 16, 16))
    guess = Guess(shape=(40, 3, 16, 16), output=(10,), targets=torch.zeros(40, dtype=torch.int64), low=low, high=high)
    recipe = Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=0.1), steps=1, restarts=2, start=start)
    return draw_start(guess, None, recipe, Generator().manual_seed(3)).reshape(2, 40, 3, 16, 16)


def test_coloured_samples_are_noise_around_colours_of_their_own() -> None:
    inputs = drawn("coloured")
    colours = inputs.mean((3, 4))  # (2, 40, 3)
    assert 0.2 < float(colours.std()) < 0.4  # uniform colours spread by 0.29
    assert 0.4 < float((inputs[0] - colours[0, ..., None, None]).std()) < 0.6
    assert float(drawn("normal").mean((3, 4)).std()) < 0.1  # plain noise has none
    assert not torch.equal(inputs[0], inputs[1])
    assert torch.equal(inputs, drawn("coloured"))
    flat, sloping = (inputs[..., 8:] - inputs[..., :8]).mean((2, 3, 4)).std(1).tolist()  # of right half from left, over 40 samples
    assert sloping > 5 * flat


def test_restarts_beyond_memory_are_refused_before_they_are_drawn(classifier, batch):
    exposure = dm.observe(classifier, batch)
    with pytest.raises(dm.Refused, match=r"100000000 restarts need about .* try fewer restarts"):
        dm.reconstruct(exposure, "dlg", restarts=10**8, steps=1)
