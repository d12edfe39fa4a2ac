"""CPL: the tiled start, one sample's gradient solved, and labels that it needs."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.matching.guess import Guess, draw_start
from dosimeter.engines.matching.recipe import Recipe


@pytest.fixture
def exposure(digits):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 10)).eval()
    return dm.observe(model, dm.Batch(digits[0][:1], digits[1][:1]))


def test_one_picture_is_recovered_from_a_tiled_start(exposure, digits):
    truth = dm.Batch(digits[0][:1], digits[1][:1])
    found = dm.reconstruct(exposure, "cpl", labels=truth.targets, steps=300)
    assert float(dm.score(found, truth)["psnr"]) > 30
    first = exposure.public.training(exposure.model, found.inputs, truth.targets, exposure.public.loss)
    gap = sum(float((first[name] - change).square().sum()) for name, change in exposure.update.items())
    assert gap < 1e-6 * sum(float(change.square().sum()) for change in exposure.update.values())  # an independent look at the gradient


def test_the_start_repeats_one_patch_of_a_quarter_of_each_side():
    bounds = {"low": torch.zeros(()), "high": torch.ones(())}
    guess = Guess(shape=(2, 3, 16, 10), output=(5,), targets=torch.zeros(2, dtype=torch.long), **bounds)

    def start(kind):
        settings = {"distance": None, "optimiser": None, "rate": None, "steps": 1, "start": kind}
        return draw_start(guess, None, Recipe(**settings), torch.Generator().manual_seed(0)).reshape(guess.shape)

    tiled = start("tiled")
    for row in range(4):
        assert tiled[:, :, 4 * row : 4 * row + 4, :9].equal(tiled[:, :, :4, :9])
    assert tiled[..., 3:6].equal(tiled[..., :3])  # a side of 10 has patches of 3, and the last one is cut
    assert tiled[..., 9:].equal(tiled[..., :1])
    assert tiled[0].std() > 0.1
    assert start("constant").unique().tolist() == [0.5]


def test_without_labels_it_is_refused(exposure):
    with pytest.raises(dm.Refused, match="labels"):
        dm.reconstruct(exposure, "cpl", steps=1)
