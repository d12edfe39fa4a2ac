"""Behind a defense that replaces the samples no proof is left at any door. A method that proved nothing does not speak of proof."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.runs.server import without_vain_proof
from dosimeter.surfaces.maps import Maps

VAIN = "of the samples after mixup, not of the private ones"


@pytest.fixture
def batch():
    rng = torch.Generator().manual_seed(3)
    return dm.Batch(torch.rand(3, 1, 8, 8, generator=rng), torch.tensor([0, 4, 7]))


def exposed(batch, *defenses: str):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))
    return dm.observe(model, batch, defenses=[dm.defense(name) for name in defenses])


def test_every_door_keeps_its_proofs_without_a_defense_and_loses_them_behind_one_that_replaces(batch):
    plain, mixed = exposed(batch), exposed(batch, "mixup")
    for exposure, proved in ((plain, True), (mixed, False)):
        found = dm.reconstruct(exposure, "linear_recursion")
        assert len(found.inputs) >= 1
        assert bool(found.premises) is proved
        assert (VAIN in found.message) is not proved
        features = dm.recover_features(exposure, "subspace")
        assert bool(features.certified.any()) is proved
        assert bool(features.premises) is proved
        assert dm.recover_labels(exposure, "subspace").certified is proved


def test_a_method_that_proved_nothing_does_not_speak_of_proof(batch):
    mixed = exposed(batch, "mixup")
    assert VAIN not in dm.recover_labels(mixed, "idlg").message
    assert VAIN not in dm.reconstruct(mixed, "inverting_gradients", labels=batch.targets, steps=2).message


def test_maps_lose_their_certificates_too(batch):
    public = exposed(batch, "mixup").public
    found = dm.types.MapEstimate(
        maps=torch.zeros(2, 1, 1, 1), layer="0", layers=(), batch_size=2, certified=torch.tensor([True, False]), error_bars=torch.zeros(2)
    )
    bare = without_vain_proof(Maps(), found, public)
    assert not bare.certified.any()
    assert VAIN in bare.message
