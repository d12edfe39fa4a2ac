"""Gradients below known maps, under known slopes: the true batch has none left to match, and a guess comes nearer to it."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, nn

import dosimeter as dm
from dosimeter.engines.downward.matching import Matching, _Below, match
from dosimeter.engines.downward.pictures import descend
from dosimeter.engines.downward.waves import Waves
from dosimeter.types import Refused


@pytest.fixture
def case(digits):
    """A network whose maps are too few to determine its inputs: 2 x 2 positions of 40 channels, and some of 16."""
    torch.manual_seed(0)
    body = [nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 40, 3, 4, 1), nn.ReLU(), nn.Conv2d(40, 40, 3, 1, 1)]
    model = nn.Sequential(*body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10)).eval()
    images = digits[0][:32].reshape(4, 8, 8, 8)
    batch = dm.Batch(images, digits[1][:4])
    exposure = dm.observe(model, batch, declare_batch_size=False)
    return exposure, descend(exposure), batch


def in_order(descent, exposure, batch) -> torch.Tensor:
    """The true inputs in the order of the maps."""
    start = descent.known[0]
    (true,) = descent.tape.run({0: batch.inputs}, dict(exposure.model.state_dict()), [start.value])
    return batch.inputs[torch.cdist(start.maps.float().flatten(1), true.flatten(1)).argmin(1)]


def test_the_true_batch_leads_to_the_maps_and_the_gradients(case) -> None:
    exposure, descent, batch = case
    assert descent.cut is not None
    below, truth = _Below.of(exposure, descent), in_order(descent, exposure, batch)
    total, distance = below.gradients(truth, 1.0)
    assert abs(distance.item()) < 1e-5
    assert total.item() < 1e-5
    assert below.gradients(truth.flip(0), 1.0)[1].item() > 1e-2


def test_matching_comes_nearer_than_the_maps_alone(case) -> None:
    exposure, descent, batch = case
    truth = in_order(descent, exposure, batch)
    alone = match(exposure, descent, Generator().manual_seed(0), Matching(approach=300))
    matched = match(exposure, descent, Generator().manual_seed(0), Matching(approach=300, steps=300, total_variation=0.0))
    assert alone.distance is None
    assert (matched.inputs - truth).square().mean() < 0.8 * (alone.inputs - truth).square().mean()


def test_matching_without_known_slopes_is_refused(case) -> None:
    exposure, descent, _ = case
    with pytest.raises(Refused, match="needs the slopes"):
        match(exposure, replace(descent, cut=None), Generator(), Matching(steps=1))


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (2, 5)])
def test_waves_of_inputs_lead_back_to_them(shape) -> None:
    inputs = 0.01 + 0.98 * torch.rand(shape, generator=Generator().manual_seed(0))
    waves = Waves.of(shape, torch.zeros(1), torch.ones(1))
    torch.testing.assert_close(waves.inputs(waves.shares(waves.unknowns(inputs))), inputs, rtol=1e-4, atol=1e-5)
