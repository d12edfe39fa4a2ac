"""Rows whose negative half mirrors their positive half."""

import math

import pytest
import torch

import dosimeter as dm
from dosimeter.inspection.checks.trap_rows import measure
from dosimeter.inspection.thresholds import THRESHOLDS


def plant_mirrors(model, noise: float) -> None:
    """Every row of the first layer: 384 positive weights, and the same ones halved with the other sign, in another order."""
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for row in model[1].weight:
            half = torch.rand(384, generator=rng) + 0.1
            mirrored = -0.5 * half * (1 + noise * torch.randn(384, generator=rng))
            row.copy_(torch.cat([half, mirrored])[torch.randperm(768, generator=rng)])


@pytest.mark.parametrize("noise", [1e-4, 1e-3])
def test_the_statistic_is_how_near_the_halves_mirror_each_other(perceptron, received, noise) -> None:
    model = perceptron()
    plant_mirrors(model, noise)
    misfits = []
    for row in model[1].weight.detach().double():
        positive, negative = sorted(row[row > 0].tolist()), sorted((-row[row < 0]).tolist())
        scale = sum(p * n for p, n in zip(positive, negative)) / sum(n * n for n in negative)
        mean = sum(positive) / len(positive)
        misfits.append(math.dist(positive, [scale * n for n in negative]) / math.dist(positive, [mean] * len(positive)))
    assert measure(received(model))[0] == pytest.approx(-math.log10(sorted(misfits)[11]), rel=1e-4)  # the lower of two medians


def test_trap_weights_are_found_and_random_rows_are_not(perceptron, received) -> None:
    model = perceptron()
    rigged = dm.attack("trap_weights", rows=100, input_shape=(3, 16, 16)).tamper(model)
    assert measure(received(rigged))[0] > THRESHOLDS["trap_rows"]
    assert measure(received(model))[0] < 2


def test_weights_of_one_magnitude_are_no_traps(perceptron, received) -> None:
    model = perceptron()
    signs = torch.ones(768).index_fill(0, torch.randperm(768, generator=torch.Generator().manual_seed(1))[:384], -1)
    with torch.no_grad():
        model[1].weight.copy_(0.001 * signs.expand(24, -1))
    assert measure(received(model))[0] < THRESHOLDS["trap_rows"]
