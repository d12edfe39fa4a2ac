"""Trap weights: more lone samples than an honest first layer shows, no mixture among them."""

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.bins.trap_rows import TrapLayer, trap_scale
from dosimeter.models.loading import load_model


def pictures(count: int, seed: int) -> dm.Batch:
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 6, 6, generator=rng)
    return dm.Batch(torch.nn.functional.interpolate(coarse, (16, 16)), torch.randint(10, (count,), generator=rng))


@pytest.mark.parametrize(("name", "options"), [("fcn3", {"hidden": (500, 32)}), ("small_cnn", {"width": 4})])
def test_most_samples_come_back_and_none_is_a_mixture(name, options) -> None:
    model, batch = load_model(name, {**options, "size": 16}, None, 2), pictures(16, 4)
    attack = dm.attack("trap_weights", expected=16, input_shape=(3, 16, 16))
    found = dm.reconstruct(dm.observe(attack.tamper(model), batch), attack)
    distance, which = (torch.cdist(found.inputs.flatten(1), batch.inputs.flatten(1)) / 768**0.5).min(1)
    assert len(found.inputs) >= 8
    assert len(which.unique()) == len(found.inputs)
    assert float(distance.max()) < 1e-2


def test_rows_fire_as_rarely_as_they_were_made_to() -> None:
    batch = pictures(200, 5)
    attack = dm.attack("trap_weights", expected=20, rows=400, input_shape=(3, 16, 16))
    rows = attack.tamper(load_model("small_cnn", {"size": 16, "width": 4}, None, 1)).rows
    with torch.no_grad():
        rate = float((rows(batch.inputs.flatten(1)) > 0).double().mean())
    assert 0.2 / 20 < rate < 5 / 20
    assert trap_scale(768, 20) < trap_scale(3072, 20) < 1


def test_a_first_layer_whose_weights_are_computed_gets_another_before_it(digits) -> None:
    images, labels = digits
    batch = dm.Batch(images[:8], labels[:8])
    first = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 40))
    model = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), torch.nn.Linear(40, 10))
    attack = dm.attack("trap_weights", input_shape=(1, 8, 8), expected=8)
    rigged = attack.tamper(model)
    assert isinstance(rigged, TrapLayer)
    found = dm.reconstruct(dm.observe(rigged, batch), attack)
    assert len(found.inputs) >= 1
    assert float(torch.cdist(found.inputs.flatten(1), batch.inputs.flatten(1)).min(1).values.max()) < 1e-2


def test_refusals(classifier, batch) -> None:
    with pytest.raises(dm.Refused, match="bears its rows"):
        dm.reconstruct(dm.observe(classifier, batch), "trap_weights")
    with pytest.raises(ValueError, match=r"attack\.scale"):
        dm.attack("trap_weights", scale=1.5)
