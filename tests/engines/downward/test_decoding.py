"""The first guess: noise like photographs, a decoder that beats grey, and one that undoes a linear layer."""

from itertools import pairwise

import pytest
import torch
from torch import Generator, nn

from dosimeter.engines.downward.decoding import decode, photographic_noise
from dosimeter.engines.downward.inversion import MapTargets, invert
from dosimeter.engines.downward.norms import Freedom
from dosimeter.engines.downward.walk import KnownMap
from dosimeter.network.tape import record, tensors_of
from dosimeter.types import Normalization


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    widths, layers = [1, 24, 32, 48], []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers).train()


def targets_of(model: nn.Module, images: torch.Tensor, factor: float = 1.0, freedom: Freedom | None = None) -> MapTargets:
    tape, tensors = record(model, torch.zeros_like(images)), tensors_of(model)
    (maps,) = tape.run({0: images}, tensors, [tape.output])
    known = KnownMap(value=tape.output, maps=factor * maps, known=torch.ones_like(maps, dtype=torch.bool), misfit=0.0, freedom=freedom)
    return MapTargets(tape=tape, tensors=tensors, maps=[known])


def test_noise_has_the_spectrum_of_photographs() -> None:
    """Low frequencies are the strong ones: neighbours of a picture are alike, and white noise would not be."""
    noise = photographic_noise(32, (3, 32, 32), Generator().manual_seed(0))
    centred = noise - noise.mean((2, 3), keepdim=True)
    alike = (centred[..., 1:] * centred[..., :-1]).mean() / centred.square().mean()
    assert alike > 0.8
    assert noise.min() >= 0
    assert noise.max() <= 1


def test_patches_that_a_layer_keeps_are_decoded_as_they_are() -> None:
    """A convolution without overlap is undone; 30 of 33 rows fit its grid, and the picture is brought to its size."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 24, 3, 3, bias=False)
    images = photographic_noise(4, (2, 30, 33), Generator().manual_seed(1))
    found = decode(targets_of(model, images), (2, 30, 33), Normalization(), Generator().manual_seed(2))
    assert found is not None
    assert float((found - images).square().mean()) < 0.1 * float(images.var())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_batch_in_train_mode_is_found_from_the_decoded_one(seed, digits) -> None:
    images = digits[0][40 * seed : 40 * seed + 3]
    targets = targets_of(network(seed), images)
    guess = decode(targets, tuple(images.shape[1:]), Normalization(), Generator().manual_seed(seed))
    assert guess is not None
    assert float((guess - images).square().mean()) < 0.75 * float((0.5 - images).square().mean())
    found = invert(targets, guess, (torch.zeros(1), torch.ones(1)), steps=40, products=30, joint=True).inputs
    assert float((found - images).square().mean()) < 1e-4


@pytest.mark.parametrize("freedom", ["batch", "sample"])
def test_a_factor_that_is_free_changes_nothing(freedom, digits) -> None:
    images = digits[0][:3]
    found = [
        decode(targets_of(network(0), images, factor, freedom), (1, 8, 8), Normalization(), Generator().manual_seed(0)) for factor in (1, 7)
    ]
    torch.testing.assert_close(*found)


def test_inputs_without_a_grid_have_no_decoder() -> None:
    targets = targets_of(nn.Linear(6, 4), torch.rand(2, 6))
    assert decode(targets, (6,), Normalization(), Generator()) is None
