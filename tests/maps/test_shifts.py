"""Shifts as a registered method: it recovers what the layer received, takes a layer, and refuses with the reason."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.config import construct, describe
from dosimeter.maps.shifts import Shifts
from dosimeter.registry import MAPS


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(
            *(nn.Conv2d(1, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)),
        ).eval()


@pytest.fixture
def batch(batch: dm.Batch) -> dm.Batch:
    return dm.Batch(batch.inputs[:3], batch.targets[:3])


@pytest.mark.parametrize(("layer", "depth"), [(None, 4), ("6", 6)])
def test_recovers_what_the_layer_receives(model, batch, rng, layer, depth):
    found = Shifts(layer=layer)(dm.observe(model, batch), rng)
    truth = model[:depth](batch.inputs).detach().double().flatten(1)
    assert found.layer == str(depth)
    assert found.certified.all()
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == list(range(len(batch.inputs)))
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars).all()


def test_the_gradient_alone_decides_and_the_stream_of_random_numbers_changes_nothing(model, batch):
    exposure = dm.observe(model, batch)
    one, other = (Shifts()(exposure, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    gaps = torch.cdist(one.maps.flatten(1), other.maps.flatten(1)).min(1).values
    assert (gaps / one.maps.flatten(1).norm(dim=1) < 1e-4).all()


def test_a_layer_that_the_model_does_not_have_is_refused(model, batch, rng):
    with pytest.raises(dm.Refused, match="no gradient of a layer 'nowhere'"):
        Shifts(layer="nowhere")(dm.observe(model, batch), rng)


def test_a_table_names_the_layer():
    method = MAPS.build("shifts", layer="6")
    assert describe(method) == {"name": "shifts", "layer": "6"}
    assert construct(Shifts, {"layer": "6"}, "maps") == method


def deep(narrow: int = 96) -> nn.Sequential:
    """Only layer 4 shows its maps by itself."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return nn.Sequential(
            *(nn.Conv2d(1, narrow, 3, 2, 1), nn.ReLU(), nn.Conv2d(narrow, 96, 3, 2, 1), nn.ReLU(), nn.Conv2d(96, 96, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(96, 96, 1), nn.ReLU(), nn.Conv2d(96, 96, 3, 1, 2, dilation=2), nn.ReLU()),
            *(nn.Conv2d(96, 96, 3, 1, 1, padding_mode="circular"), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
        ).eval()


@pytest.mark.parametrize(("layer", "word"), [("0", "stride"), ("2", "stride"), ("6", "1 by 1"), ("8", "dilated"), ("10", "circular")])
def test_a_layer_whose_own_gradient_shows_nothing_gets_its_maps_from_another_layer(batch, layer, word):
    model = deep()
    found = dm.recover_maps(dm.observe(model, batch, declare_batch_size=False), layer=layer)
    truth = model[: int(layer)](batch.inputs).detach().double()
    assert found.layer == layer
    assert found.maps.shape == truth.shape
    assert found.certified.all()
    assert [one.name for one in found.layers] == sorted(["4", layer], key=int)
    assert word in found.message
    distances, partners = torch.cdist(found.maps.flatten(1), truth.flatten(1)).min(1)
    errors = distances / truth.flatten(1).norm(dim=1)[partners]
    assert sorted(partners.tolist()) == [0, 1, 2]
    assert errors.max() < 1e-4
    assert (errors < found.error_bars).all()
    assert found.samples is not None
    assert found.samples.labels is not None
    assert torch.equal(found.samples.labels, batch.targets[partners])


def test_a_layer_below_the_end_of_the_walk_is_refused_with_both_reasons(batch):
    with pytest.raises(dm.Refused, match="The walk down from 4 does not tell them: "):
        dm.recover_maps(dm.observe(deep(narrow=32), batch), layer="0")


def test_maps_that_follow_are_not_certified_where_they_are_fewer_than_the_declared_size(batch):
    exposure = dm.observe(deep(), dm.Batch(batch.inputs[[0, 1, 1]], batch.targets[[0, 1, 1]]))
    found = dm.recover_maps(exposure, layer="6")
    assert found.batch_size == 2
    assert not found.certified.any()
    assert "mean of several" in found.message
