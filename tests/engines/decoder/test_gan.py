"""The generator trained against a critic: what it draws looks like its lessons, and its seed decides it."""

import pytest
import torch

from dosimeter.engines.decoder.gan import train_gan


@pytest.fixture(scope="module")
def bars():
    """Pictures with one bright column each: what a generator has to find out."""
    rng = torch.Generator().manual_seed(0)
    pixels = 0.1 * torch.rand(256, 1, 8, 8, generator=rng)
    pixels[torch.arange(256), 0, :, torch.randint(8, (256,), generator=rng)] = 0.95
    return pixels


def drawn(bars, epochs, seed=1):
    drawer = train_gan(bars, dimensions=8, width=16, epochs=epochs, rng=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return drawer(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)))


def test_training_brings_the_pictures_nearer_to_its_lessons_and_keeps_them_apart(bars):
    def nearest(pictures):
        return float(torch.cdist(pictures.flatten(1), bars.flatten(1)).amin(1).mean())

    before, after = drawn(bars, 0), drawn(bars, 80)
    assert nearest(after) < 0.7 * nearest(before)
    assert nearest(after) < nearest(bars.mean(0, keepdim=True))
    assert float(torch.pdist(after.flatten(1)).mean()) > 0.3 * float(torch.pdist(bars.flatten(1)).mean())


def test_the_seed_decides_the_generator(bars):
    assert torch.equal(drawn(bars, 1), drawn(bars, 1))
    assert not torch.equal(drawn(bars, 1), drawn(bars, 1, seed=3))
