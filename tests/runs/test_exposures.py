"""Exposures that measurements share: the same as exposures of their own, and observed once."""

import warnings
from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.models.loading import ModelConfig
from dosimeter.runs import exposures
from dosimeter.runs.audit import Suite, run_suite
from dosimeter.runs.audited_client import DataConfig, prepare
from dosimeter.runs.experiment import run
from dosimeter.runs.exposures import Exposures, expose
from dosimeter.runs.measurement import Measurement, Protocol


@pytest.fixture(scope="module")
def subject():
    return prepare(ModelConfig(), DataConfig(name="photographs", size=16, batch_size=3, auxiliary=8), seed=5)


@pytest.fixture
def observed(monkeypatch):
    """The batches that were observed."""
    seen, genuine = [], exposures.observe
    monkeypatch.setattr(exposures, "observe", lambda model, batch, **options: (seen.append(batch), genuine(model, batch, **options))[1])
    return seen


def test_a_shared_exposure_is_what_observing_anew_gives(subject):
    exposing = Exposures()
    noise = Protocol(defenses=(dm.defense("gaussian_noise", std=0.1),))
    for protocol in (Protocol(), noise, Protocol(), noise, Protocol(seed=1)):
        for batch in (subject.batch, subject.foreign):
            shared, own = exposing(subject, protocol, batch), expose(subject, protocol, batch)
            assert all(torch.equal(shared.update[name], change) for name, change in own.update.items())
            assert shared.public == own.public


def test_an_audit_observes_each_client_once_and_finds_the_same(subject, observed):
    chosen = {"labels": (dm.label_recovery("ilrg"), dm.label_recovery("zlg")), "features": (dm.feature_recovery("subspace"),), "maps": ()}
    attacks = tuple(dm.attack("inverting_gradients", steps=2, total_variation=weight) for weight in (0.0, 1.0))
    suite = Suite(methods={**chosen, "attacks": attacks})
    records = run_suite(subject, suite).records
    assert sum(batch is subject.batch for batch in observed) == 1
    assert sum(batch is subject.foreign for batch in observed) == 1
    alone = [run(subject, Measurement(labels=method)) for method in chosen["labels"]]
    for shared, own in zip(records, alone):
        assert (shared.metrics, shared.nulls) == (own.metrics, own.nulls)
        assert {name: told for name, told in shared.details.items() if name != "ceiling"} == own.details  # an audit adds ceilings
    labels = dm.label_recovery("ilrg")
    own = run(subject, Measurement(labels=labels, method=attacks[1]))
    shared = next(record for record in records if record.key == own.key)
    assert shared.metrics == own.metrics
    assert shared.nulls == {
        name: own.nulls[name] for name in shared.nulls
    }  # a quick audit leaves the foreign null out where it decides nothing


@pytest.mark.parametrize("change", [lambda e: next(e.model.parameters()).data.mul_(0), lambda e: next(iter(e.update.values())).zero_()])
def test_an_exposure_that_a_method_wrote_to_is_made_anew(subject, change):
    exposing = Exposures()
    first = exposing(subject, Protocol(), subject.batch)
    with torch.no_grad():
        change(first)
    again, own = exposing(subject, Protocol(), subject.batch), expose(subject, Protocol(), subject.batch)
    assert all(torch.equal(again.update[name], value) for name, value in own.update.items())
    assert all(torch.equal(*pair) for pair in zip(again.model.parameters(), own.model.parameters()))


def test_every_record_has_the_warnings_of_its_exposure(subject):
    bright = replace(subject, batch=dm.Batch(3 * subject.batch.inputs, subject.batch.targets))
    exposing = Exposures()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            exposing(bright, Protocol(), bright.batch)
        assert any("outside what the normalisation maps" in str(warning.message) for warning in said)


def test_batches_drawn_for_once_and_old_protocols_are_not_held(subject, observed):
    exposing = Exposures()
    drawn = dm.Batch(subject.batch.inputs.clone(), subject.batch.targets)
    for _ in range(2):
        exposing(subject, Protocol(), drawn)
    assert len(observed) == 2
    for seed in range(exposures.MOST_KEPT + 1):
        exposing(subject, Protocol(seed=seed), subject.batch)
    assert len(exposing._kept) == exposures.MOST_KEPT
