"""Maps behind activations that can be negative: the head's proved features tell the samples apart."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.shifts.floors import find_corners
from dosimeter.engines.shifts.head_samples import _Problem


def small_net(activation: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        layers = [
            nn.Conv2d(1, 48, 3, 2, 1),
            activation(),
            nn.Conv2d(48, 48, 3, 2, 1),
            activation(),
            nn.Conv2d(48, 48, 3, 1, 1),
            activation(),
        ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)).eval()


@pytest.mark.parametrize("activation", [nn.SiLU, nn.GELU, nn.LeakyReLU])
def test_every_sample_is_certified_and_right_within_its_bar(digits, activation):
    images, labels = digits
    model = small_net(activation)
    found = dm.recover_maps(dm.observe(model, dm.Batch(images[:3], labels[:3])))
    assert found.layer == "4"
    assert found.certified.all()
    truth = model[:4](images[:3]).detach().double().flatten(1)
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == [0, 1, 2]
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars).all()


def test_without_the_heads_gradient_nothing_tells_the_samples_apart(digits):
    images, labels = digits
    batch = dm.Batch(images[:3], labels[:3])
    withheld = (dm.defense("head_withheld"),)
    with pytest.raises(dm.Refused, match="the head's samples do not tell its samples apart: the head's gradient does not prove 3 features"):
        dm.recover_maps(dm.observe(small_net(nn.SiLU), batch, defenses=withheld))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Tanh])
def test_a_single_sample_needs_no_head(digits, activation):
    images, labels = digits
    model = small_net(activation)
    found = dm.recover_maps(dm.observe(model, dm.Batch(images[7:8], labels[7:8]), defenses=(dm.defense("head_withheld"),)))
    assert found.certified.tolist() == [True]
    truth = model[: int(found.layer)](images[7:8]).detach().double()
    assert float((found.maps - truth).norm() / truth.norm()) < float(found.error_bars[0])


def normed_net(activation: nn.Module, seed: int) -> nn.Module:
    """Batch norm in train mode before and behind layer 3, which no shortcut leads past; 96 channels on a grid of 4 by 4."""

    def block(inputs: int, kernel: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 96, kernel, stride, kernel % 7 // 2), nn.BatchNorm2d(96), activation]

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [*block(1, 7, 7), *block(96, 3, 1)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)).train()


def pictures(seed: int) -> dm.Batch:
    rng = torch.Generator().manual_seed(seed)
    coarse = nn.functional.interpolate(torch.rand(4, 1, 4, 4, generator=rng), (28, 28), mode="bilinear")
    return dm.Batch((coarse + 0.3 * torch.rand(4, 1, 28, 28, generator=rng)).clamp(0, 1), torch.tensor([seed % 10, 3, 1, 7]))


@pytest.mark.parametrize(("activation", "seed"), [(nn.SiLU(), 21), (nn.GELU(), 22)])
def test_in_train_mode_all_samples_are_solved_for_at_once(activation, seed):
    model, batch = normed_net(activation, seed), pictures(seed)
    found = dm.recover_maps(dm.observe(model, batch, declare_batch_size=False), layer="3")
    assert found.certified.all()
    truth = normed_net(activation, seed)[:3](batch.inputs).detach().double().flatten(1)
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == [0, 1, 2, 3]
    errors = distances / truth.norm(dim=1)[partners]
    assert (errors < 1e-3).all()
    assert (errors < found.error_bars).all()


def test_in_train_mode_an_activation_without_a_least_value_is_refused():
    with pytest.raises(dm.Refused, match="batch norm in train mode ties the samples together"):
        dm.recover_maps(dm.observe(normed_net(nn.LeakyReLU(0.2), 23), pictures(23)), layer="3")


def test_a_corner_that_is_no_sample_touches_the_least_value_hardly_more_often_than_there_are_samples():
    rng = torch.Generator().manual_seed(5)
    maps = nn.functional.silu(torch.randn(6, 3000, generator=rng, dtype=torch.float64))
    mixing = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    found = find_corners(mixing @ maps, float(maps.min()), np.random.default_rng(0))
    assert found is not None
    assert int(found.touching.sum()) == 6
    corners = found.coefficients @ mixing @ maps
    off = torch.cdist(corners, maps).min(1).values / maps.norm(dim=1).mean()
    assert (off[found.touching] < 2e-2).all()
    assert (off[~found.touching] > 2e-2).all()
    assert find_corners(mixing @ maps, 0.0, np.random.default_rng(0)) is None


def test_an_error_of_a_feature_is_an_error_of_its_map():
    """A fit hides a feature's error: the map takes it over. So the feature's own error bar bounds the map's from below."""
    rng = torch.Generator().manual_seed(0)
    mixtures, matrix = torch.randn(2, 1, 6, generator=rng).double(), torch.randn(6, 9, generator=rng).double()
    run = type("Run", (), {"probes": torch.zeros(2, 6), "__call__": lambda _, maps: maps @ matrix})()
    problem = _Problem(tail=run, layer=SimpleNamespace(module=nn.Linear(6, 3)), mixtures=mixtures)
    mixing = torch.eye(2).double()
    features = problem.features(mixing)
    assert float(problem.errors(mixing, features, torch.zeros(2)).max()) < 1e-12
    moved = 1e-3 * problem.slopes(mixing)[:, :, 0]  # an error that the fit follows, without any residual
    bars = moved.norm(dim=1) / features.norm(dim=1)
    found, residual = problem.solve(mixing, features + moved)
    assert float(residual.max()) < 1e-6
    off = ((found - mixing) @ mixtures[:, 0]).norm(dim=1) / mixtures[:, 0].norm(dim=1)
    assert float(off.min()) > 1e-4
    assert bool((off <= problem.errors(found, features + moved, bars) * (1 + 1e-6)).all())
