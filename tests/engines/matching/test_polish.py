"""Polishing: exact from nearby, left alone where it leads nowhere."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, nn

import dosimeter as dm
from dosimeter.engines.matching.polish import polish


@pytest.fixture
def case(digits) -> tuple[dm.Exposure, dm.Batch]:
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    rows = [int((labels == label).nonzero()[7]) for label in (2, 5, 9)]
    batch = dm.Batch(images[rows], labels[rows])
    return dm.observe(model, batch), batch


def rough(exposure: dm.Exposure, batch: dm.Batch, **options) -> dm.Reconstruction:
    return dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, steps=300, **options)


def error(found: dm.Reconstruction, batch: dm.Batch) -> float:
    return float((found.inputs - batch.inputs).abs().max())


def test_a_guess_that_is_near_becomes_exact(case) -> None:
    exposure, batch = case
    before, after = rough(exposure, batch), rough(exposure, batch, polish=300)
    assert error(before, batch) > 0.02
    assert error(after, batch) < 1e-3
    assert "polished by least squares" in after.message
    replayed = dm.observe(exposure.model, dm.Batch(after.inputs, batch.targets)).update
    squared, size = (sum(float(v.double().square().sum()) for v in d.values()) for d in (_less(replayed, exposure.update), exposure.update))
    assert after.objective == pytest.approx(squared / size, abs=1e-9)
    assert after.objective < 1e-8


def _less(one: dict, other: dict) -> dict:
    return {name: one[name] - other[name] for name in one}


def test_what_noise_left_is_not_polished(case) -> None:
    exposure, batch = case
    noise = Generator().manual_seed(1)
    size = max(float(change.std()) for change in exposure.update.values())
    noisy = replace(exposure, update={k: v + 0.1 * size * torch.randn(v.shape, generator=noise) for k, v in exposure.update.items()})
    before, after = rough(noisy, batch), rough(noisy, batch, polish=100)
    assert torch.equal(before.inputs, after.inputs)
    assert "polished" not in after.message


def test_an_attack_that_gave_up_is_handed_on(case) -> None:
    exposure, _ = case
    nothing = exposure.without_inputs(dm.Outcome.IMPOSSIBLE, "no reason")
    assert polish(nothing, exposure, None, Generator(), steps=5) is nothing


def test_no_time_is_left_to_polish_in(case) -> None:
    exposure, batch = case
    assert "polished" not in rough(exposure, batch, polish=300, seconds=1e-6).message
