"""Pixelation with Laplace noise."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.defenses.dp_pixelation import DPPixelation
from dosimeter.defenses.pixelation import Pixelation
from dosimeter.interfaces import Client
from dosimeter.randomness import generator


def drawn(inputs, defense):
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 3))
    batch = dm.Batch(inputs, torch.zeros(len(inputs), dtype=torch.long))
    client = Client(model=model, batch=batch, training=dm.FedSGD(), loss=dm.CrossEntropy())
    return defense(client, generator(1, "noise")).batch.inputs


def test_the_noise_has_the_papers_scale_and_is_one_number_a_square():
    inputs = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    defense = DPPixelation(block=4, epsilon=0.5, neighbours=16)
    assert defense.scale() == pytest.approx(16 / (16 * 0.5))  # m / (b² ε), pixels in [0, 1]
    noise = (drawn(inputs, defense) - drawn(inputs, Pixelation(block=4)))[:, :, ::4, ::4]
    assert float(noise.abs().mean()) == pytest.approx(defense.scale(), rel=0.05)  # a Laplace distribution's mean magnitude
    squares = drawn(inputs, defense).unfold(2, 4, 4).unfold(3, 4, 4).flatten(4)
    assert float((squares.amax(-1) - squares.amin(-1)).abs().max()) == 0


def test_neighbouring_images_have_means_within_the_sensitivity():
    first = torch.zeros(1, 1, 8, 8)
    second = first.clone()
    second.view(-1)[torch.randperm(64, generator=torch.Generator().manual_seed(0))[:5]] = 1
    defense = DPPixelation(block=4, epsilon=1.0, neighbours=5)
    gap = (drawn(first, Pixelation(block=4)) - drawn(second, Pixelation(block=4)))[:, :, ::4, ::4].abs().sum()
    assert float(gap) <= defense.scale() * defense.epsilon + 1e-6


def test_much_privacy_budget_is_plain_pixelation_and_odd_sides_are_refused():
    inputs = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn(inputs, DPPixelation(block=2, epsilon=1e9)), drawn(inputs, Pixelation(block=2)), atol=1e-6, rtol=0)
    with pytest.raises(dm.Refused, match="multiples of block = 3"):
        drawn(inputs, DPPixelation(block=3, epsilon=1.0))
    with pytest.raises(ValueError, match="high: expected more than low = 1"):
        DPPixelation(block=2, epsilon=1.0, low=1.0)
