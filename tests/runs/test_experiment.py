from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.matching import descent
from dosimeter.models.loading import ModelConfig
from dosimeter.runs import experiment
from dosimeter.runs.audited_client import DataConfig, client_from, prepare
from dosimeter.runs.experiment import run
from dosimeter.runs.exposures import expose
from dosimeter.runs.measurement import Measurement, key_of
from dosimeter.surfaces.judging import judge_surfaces
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Refused


@pytest.fixture(scope="module")
def subject():
    return prepare(ModelConfig(), DataConfig(name="photographs", size=16, batch_size=3, auxiliary=40), seed=5)


def test_labels_are_measured(subject):
    record = run(subject, Measurement(labels=dm.label_recovery("ilrg")))
    assert (record.surface, record.method, record.outcome) == ("labels", "ilrg", "completed")
    assert record.metrics["insacc"] == [1.0]
    assert 0 < record.nulls["prior"]["insacc"][0] < 1
    assert record.verdict == Verdict.LEAKED
    assert record.threat_model["mode"] == "eval"
    assert record.threat_model["stage"] == "untrained"


def test_inputs_are_measured_beside_their_nulls(subject):
    attack = dm.attack("inverting_gradients", steps=300)
    record = run(subject, Measurement(labels=dm.label_recovery("ilrg"), method=attack))
    assert record.threat_model["labels"] == "recovered by ilrg"
    assert set(record.nulls) == {"mean", "nearest", "foreign"}
    assert all(len(record.nulls[null]["psnr"]) == 3 for null in record.nulls)
    best = [max(column) for column in zip(*(record.nulls[null]["psnr"] for null in record.nulls))]
    beaten = sum(score >= null + 3 for score, null in zip(record.metrics["psnr"], best))
    assert beaten >= 2
    assert record.verdict == Verdict.LEAKED
    assert f"{beaten} of 3 inputs" in record.reason
    assert len(record.evidence) == 3


def test_same_seed_same_record(subject):
    measurement = Measurement(labels="given", method=dm.attack("inverting_gradients", steps=5))
    first, again = run(subject, measurement), run(subject, measurement)
    assert (first.metrics, first.nulls, first.key, first.evidence) == (again.metrics, again.nulls, again.key, again.evidence)


def test_the_foreign_null_uses_another_batch(subject):
    assert not torch.equal(subject.batch.inputs, subject.foreign.inputs)
    record = run(subject, Measurement(method=dm.attack("inverting_gradients", steps=300)))
    assert max(record.nulls["foreign"]["psnr"]) < min(record.metrics["psnr"])


def test_an_attack_that_could_not_run_is_not_attempted_and_never_scored(subject):
    blind = replace(subject, model=torch.nn.Sequential(Detached(), subject.model).eval())
    measurement = Measurement(method=dm.attack("inverting_gradients", steps=2))
    record = run(blind, measurement)
    assert (record.verdict, record.outcome, record.metrics) == ("not attempted", "not attempted", {})
    assert "passes no gradient to its inputs" in record.reason
    with pytest.raises(Refused, match="passes no gradient to its inputs"):
        run(blind, measurement, raise_refusals=True)


class Detached(torch.nn.Module):
    def forward(self, inputs):
        return inputs.detach()


def test_an_attack_that_an_error_stopped_is_not_measured(subject, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(descent, "move", fail)
    record = run(subject, Measurement(method=dm.attack("inverting_gradients", steps=2)))
    assert (record.verdict, record.outcome, record.metrics) == ("not measured", "crashed", {})
    assert record.reason.startswith("out of memory")


def test_a_divergence_is_warned_of(subject):
    record = run(subject, Measurement(method=dm.attack("inverting_gradients", steps=2, learning_rate=3e38)))
    assert record.outcome == "diverged"
    assert [warning for warning in record.warnings if warning.startswith("diverged, so that what is scored is no answer: a step left")]


def test_a_foreign_client_that_cannot_be_attacked_is_replaced_by_another(subject):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 10)).eval()
    torch.nn.init.zeros_(model[1].weight)
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([500.0] + [0.0] * 9))
    sure = dm.Batch(subject.foreign.inputs, torch.zeros_like(subject.foreign.targets))
    wrong = dm.Batch(subject.batch.inputs, torch.ones_like(subject.batch.targets))
    record = run(replace(subject, model=model, batch=wrong, foreign=sure), Measurement(method=dm.attack("inverting_gradients", steps=2)))
    assert set(record.nulls) == {"mean", "nearest", "foreign"}
    assert "refused_nulls" not in record.details


def test_a_null_that_cannot_be_made_is_named_and_nothing_leaks_without_it(subject, monkeypatch):
    def fails_elsewhere(exposure, measurement, given):
        if torch.equal(given, subject.batch.targets) and exposure is own:
            return dm.Reconstruction(inputs=subject.batch.inputs, labels=given, objective=0.0)
        raise Refused("this gradient is foreign")

    measurement = Measurement(method=dm.attack("inverting_gradients", steps=2))
    own = expose(subject, measurement, subject.batch)
    monkeypatch.setattr(experiment, "_attack", fails_elsewhere)
    record = run(subject, measurement, exposure=own)
    assert record.metrics["psnr"] == [100.0] * 3
    assert record.verdict == Verdict.NOT_SHOWN
    why = "the method refused each of 5 foreign gradients: this gradient is foreign"
    assert record.reason.endswith(f"no leak is claimed without a null of the same kind: {why}")
    assert record.details["refused_nulls"] == {"foreign": why}
    assert f"the null 'foreign' could not be made: {why}" in record.warnings
    assert "foreign" not in record.nulls


def test_a_refusal_is_a_finding_or_raised(subject):
    measurement = Measurement(labels="optimised", method=dm.attack("inverting_gradients", steps=2))
    record = run(subject, measurement)
    assert (record.verdict, record.outcome, record.metrics) == ("not attempted", "not attempted", {})
    assert "needs labels" in record.reason
    with pytest.raises(Refused, match="inverting_gradients needs labels"):
        run(subject, measurement, raise_refusals=True)
    with pytest.raises(ValueError, match="nothing to measure"):
        run(subject, Measurement())


def test_under_optimisation_is_said(subject):
    record = run(subject, Measurement(method=dm.attack("inverting_gradients", steps=1)))
    assert record.details["objective"] > record.details["objective_at_truth"]
    assert any(warning.startswith("under-optimised") for warning in record.warnings)
    assert record.verdict == "not shown at this budget"
    assert "under-optimised: the attack ended at objective" in record.reason
    (verdict,) = judge_surfaces([record])
    assert (verdict.under_optimised, verdict.reason) == (True, record.reason)


def test_private_foreign_and_auxiliary_samples_are_disjoint():
    subject = prepare(ModelConfig(), DataConfig(name="digits", batch_size=8, auxiliary=100), seed=1)
    rows = torch.cat([subject.batch.inputs, subject.foreign.inputs, subject.auxiliary.inputs]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows) == 116


def test_the_seed_draws_the_batch_and_the_key_knows_it():
    subjects = [prepare(ModelConfig(), DataConfig(name="digits"), seed=seed) for seed in (1, 1, 2)]
    measurement = Measurement(labels=dm.label_recovery("idlg"))
    first, again, other = (key_of(subject, measurement) for subject in subjects)
    assert first == again != other


def test_a_model_can_be_trained_first():
    subject = prepare(ModelConfig(epochs=4, options={"activation": "relu"}), DataConfig(name="digits"), seed=0)
    assert subject.description["accuracy"] > 0.8
    assert subject.description["stage"] == "untrained, then 4 epochs here"


def test_objects_of_a_python_caller(classifier, batch):
    subject = client_from(classifier, batch)
    assert subject.description["accuracy_on"] == "the private batch itself"
    assert subject.foreign.inputs.shape == batch.inputs.shape
    assert not torch.equal(subject.foreign.inputs, batch.inputs)


@pytest.mark.parametrize("name", ["random_labels", "mixup", "pixelation", "label_smoothing"])
def test_certificates_of_replaced_samples_prove_nothing_of_the_private_ones(subject, name):
    options = {
        "random_labels": {"epsilon": 0.0},
        "mixup": {"alpha": 1.0},
        "pixelation": {"block": 4},
        "label_smoothing": {"smoothing": 0.1},
    }
    defended = {"defenses": (dm.defense(name, **options[name]),), "seed": 3}
    labels = run(subject, Measurement(labels=dm.label_recovery("subspace"), **defended))
    features = run(subject, Measurement(method=dm.feature_recovery("subspace"), labels="optimised", **defended))
    replaced = name != "label_smoothing"
    assert labels.details["certified"] == (not replaced)
    assert bool(features.details["certified"]) == (not replaced)
    assert features.details.get("false_certificates") == (None if replaced else 0)
    assert "refuted" not in features.reason
    proves = name in ("random_labels", "pixelation")  # behind mixup nothing is proved, so that no proof is spoken of
    assert (f"after {name}" in features.details["message"]) == proves
    if name == "random_labels":  # the inputs are the private ones still
        assert features.verdict == Verdict.LEAKED
