"""Free statistics: those of the noise give what train mode gives of the noise, and a batch in train mode is drawn from them."""

from itertools import pairwise

import pytest
import torch
from torch import Generator, nn

from dosimeter.engines.downward.inversion import MapTargets, invert
from dosimeter.engines.downward.norms import affine_names, replace_norms
from dosimeter.engines.downward.statistics import _free_norms, photographic_noise, start_in_train_mode
from dosimeter.engines.downward.walk import KnownMap
from dosimeter.network.tape import record, tensors_of
from dosimeter.types import Normalization


def network(seed: int, norms: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    widths, layers = [1, 24, 32, 48], []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after) if norms else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers).train()


def targets_of(model: nn.Module, images: torch.Tensor) -> MapTargets:
    tape, tensors = record(model, torch.zeros_like(images)), tensors_of(model)
    (maps,) = tape.run({0: images}, tensors, [tape.output])
    known = KnownMap(value=tape.output, maps=maps, known=torch.ones_like(maps, dtype=torch.bool), misfit=0.0)
    return MapTargets(tape=tape, tensors=tensors, maps=[known])


def test_the_statistics_of_the_noise_give_what_train_mode_gives_of_it() -> None:
    noise = photographic_noise(8, (1, 12, 12), Generator().manual_seed(0))
    targets = targets_of(network(0), noise)
    norms = _free_norms(targets, noise)
    tensors = dict(targets.tensors)
    for norm in norms:
        tensors |= dict(zip(affine_names(norm.output), norm.affine(torch.zeros_like(norm.mean), torch.zeros_like(norm.mean))))
    (found,) = replace_norms(targets.tape, [norm.output for norm in norms]).run({0: noise}, tensors, [targets.tape.output])
    torch.testing.assert_close(found, targets.maps[0].maps, rtol=1e-4, atol=1e-5)


def test_noise_has_the_spectrum_of_photographs() -> None:
    """Low frequencies are the strong ones: neighbours of a picture are alike, and white noise would not be."""
    noise = photographic_noise(32, (3, 32, 32), Generator().manual_seed(0))
    centred = noise - noise.mean((2, 3), keepdim=True)
    alike = (centred[..., 1:] * centred[..., :-1]).mean() / centred.square().mean()
    assert alike > 0.8
    assert noise.min() >= 0
    assert noise.max() <= 1


@pytest.mark.parametrize("seed", [1, 2])
def test_a_batch_in_train_mode_is_found_from_free_statistics(seed, digits) -> None:
    images = digits[0][40 * seed : 40 * seed + 3]
    targets, bounds = targets_of(network(seed), images), (torch.zeros(1), torch.ones(1))
    rng = Generator().manual_seed(seed)
    start = (0.5 + 0.1 * torch.randn(images.shape, generator=rng)).clamp(0, 1)
    near = start_in_train_mode(targets, start, bounds, Normalization(), rng, steps=30, products=20, seconds=None)
    found = invert(targets.residuals, near, bounds, steps=40, products=30, joint=True).inputs
    assert float((found - images).square().mean()) < 1e-4


def test_a_model_without_norms_keeps_its_start(digits) -> None:
    images = digits[0][:2]
    targets = targets_of(network(0, norms=False), images)
    start = torch.full_like(images, 0.5)
    given = {"steps": 1, "products": 1, "seconds": None}
    assert start_in_train_mode(targets, start, (torch.zeros(1), torch.ones(1)), Normalization(), Generator(), **given) is start
