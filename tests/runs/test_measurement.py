"""What a measurement scores, and when two measurements are the same."""

from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.options import OptionError
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol, facts_of, identity_of, key_of, versions

LABELS, FEATURES, ATTACK = dm.label_recovery("ilrg"), dm.feature_recovery("subspace"), dm.attack("dlg", steps=3)


@pytest.fixture
def client(classifier, batch) -> AuditedClient:
    return AuditedClient(model=classifier, batch=batch, auxiliary=batch, description={"model": "small", "batch_hash": "a"})


@pytest.mark.parametrize(
    ("methods", "scored", "surface"),
    [
        ({"labels": LABELS}, LABELS, "labels"),
        ({"labels": LABELS, "features": FEATURES}, FEATURES, "features"),
        ({"labels": LABELS, "features": FEATURES, "attack": ATTACK}, ATTACK, "inputs"),
        ({"labels": "optimised"}, None, "labels"),
    ],
)
def test_the_last_method_is_scored(methods, scored, surface):
    measurement = Measurement(**methods)
    assert measurement.method is scored
    assert measurement.surface == surface
    assert measurement.tampering is None


def test_a_method_that_changes_the_model_is_found():
    attack = dm.attack("gradfilt", targets=(3,))
    assert Measurement(labels=LABELS, attack=attack).tampering is attack


def test_the_key_sees_the_description_and_every_option_and_nothing_else(client, normed_classifier):
    measurement = Measurement(labels=LABELS, attack=ATTACK)
    key = key_of(client, measurement)
    assert key == key_of(replace(client, model=normed_classifier), replace(measurement, attack=dm.attack("dlg", steps=3)))
    others = [
        key_of(replace(client, description={"model": "small", "batch_hash": "b"}), measurement),
        *(key_of(client, replace(measurement, **change)) for change in ({"seed": 1}, {"adaptive": True}, {"labels": "given"})),
        key_of(client, replace(measurement, attack=dm.attack("dlg", steps=4))),
    ]
    assert len({key, *others}) == 6


def test_the_identity_tells_the_threat_model(client):
    identity = identity_of(client, Measurement(labels=LABELS, attack=ATTACK, declare_batch_size=False, seed=4))
    assert (identity["surface"], identity["method"], identity["seed"]) == ("inputs", "dlg", 4)
    assert identity["key"] == key_of(client, Measurement(labels=LABELS, attack=ATTACK, declare_batch_size=False, seed=4))
    assert identity["versions"] == versions()
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


@pytest.mark.parametrize(("option", "value"), [("seed", "x"), ("labels", "guessed"), ("attack", "dlg"), ("adaptive", 1)])
def test_what_is_no_measurement_is_refused_with_the_option(option, value):
    with pytest.raises(OptionError, match=f"{option}: expected"):
        Measurement(**{option: value})
