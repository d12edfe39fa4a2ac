"""What a measurement scores, and when two measurements are the same."""

from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.config import construct, describe
from dosimeter.options import OptionError
from dosimeter.registry import MAPS as MAP_RECOVERIES
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol, facts_of, identity_of, key_of, versions

LABELS, FEATURES, ATTACK = dm.label_recovery("ilrg"), dm.feature_recovery("subspace"), dm.attack("dlg", steps=3)
MAPS = MAP_RECOVERIES.build("shifts")


@pytest.fixture
def client(classifier, batch) -> AuditedClient:
    return AuditedClient(model=classifier, batch=batch, auxiliary=batch, description={"model": "small", "batch_hash": "a"})


@pytest.mark.parametrize(
    ("methods", "scored", "surface"),
    [
        ({"labels": LABELS}, LABELS, "labels"),
        ({"labels": LABELS, "method": FEATURES}, FEATURES, "features"),
        ({"labels": "optimised", "method": MAPS}, MAPS, "maps"),
        ({"labels": LABELS, "method": ATTACK}, ATTACK, "inputs"),
    ],
)
def test_the_method_is_scored_or_else_the_label_recovery(methods, scored, surface):
    measurement = Measurement(**methods)
    assert measurement.scored is scored
    assert measurement.surface.name == surface
    assert measurement.tampering is None


def test_a_file_names_the_method_under_the_key_of_its_surface():
    measurement = construct(Measurement, {"labels": "ilrg", "attack": {"name": "dlg", "steps": 3}})
    assert measurement == Measurement(labels=LABELS, method=ATTACK)
    described = describe(measurement)
    assert described["attack"]["steps"] == 3
    assert "method" not in described
    assert construct(Measurement, described) == measurement
    assert construct(Measurement, {"features": "subspace"}).method == FEATURES


def test_two_methods_and_none_are_refused():
    with pytest.raises(OptionError, match="features and attack: expected one method"):
        construct(Measurement, {"features": "subspace", "attack": "dlg"})
    with pytest.raises(OptionError, match="did you mean 'attack'"):
        construct(Measurement, {"atack": "dlg"})
    with pytest.raises(ValueError, match="nothing to measure"):
        _ = Measurement(labels="optimised").surface


def test_a_method_that_changes_the_model_is_found():
    attack = dm.attack("gradfilt", targets=(3,))
    assert Measurement(labels=LABELS, method=attack).tampering is attack


def test_the_key_sees_the_description_and_every_option_and_nothing_else(client, normed_classifier):
    measurement = Measurement(labels=LABELS, method=ATTACK)
    key = key_of(client, measurement)
    assert key == key_of(replace(client, model=normed_classifier), replace(measurement, method=dm.attack("dlg", steps=3)))
    others = [
        key_of(replace(client, description={"model": "small", "batch_hash": "b"}), measurement),
        *(key_of(client, replace(measurement, **change)) for change in ({"seed": 1}, {"adaptive": True}, {"labels": "given"})),
        key_of(client, replace(measurement, method=dm.attack("dlg", steps=4))),
    ]
    assert len({key, *others}) == 6


def test_the_identity_tells_the_threat_model(client):
    identity = identity_of(client, Measurement(labels=LABELS, method=ATTACK, declare_batch_size=False, seed=4))
    assert (identity["surface"], identity["method"], identity["seed"]) == ("inputs", "dlg", 4)
    assert identity["key"] == key_of(client, Measurement(labels=LABELS, method=ATTACK, declare_batch_size=False, seed=4))
    assert identity["versions"] == versions(client)
    assert identity["versions"]["threads"] == str(torch.get_num_threads())
    told = identity["threat_model"]
    assert told["labels"] == "recovered by ilrg"
    assert (told["auxiliary"], told["batch_size"], told["batch_size_declared"]) == (6, 6, False)
    assert identity_of(replace(client, auxiliary=None), Measurement(labels=LABELS))["threat_model"]["auxiliary"] == 0


def test_the_facts_are_those_of_the_client_and_its_protocol(client):
    facts = facts_of(client, Protocol(training=dm.FedAvg(steps=2), defenses=(dm.defense("sign"),)))
    assert (facts["model"], facts["mode"], facts["input_shape"]) == ("small", "eval", [1, 8, 8])
    assert (facts["training"]["name"], facts["training"]["steps"]) == ("fedavg", 2)
    assert [defense["name"] for defense in facts["defenses"]] == ["sign"]


@pytest.mark.parametrize(("option", "value"), [("seed", "x"), ("labels", "guessed"), ("method", "dlg"), ("adaptive", 1)])
def test_what_is_no_measurement_is_refused_with_the_option(option, value):
    with pytest.raises(OptionError, match=f"{option}: expected"):
        Measurement(**{option: value})
