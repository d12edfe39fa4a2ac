import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.models.loading import ModelConfig
from dosimeter.records import FILE_NAME, read_records
from dosimeter.runs.audit import Suite, run_suite
from dosimeter.runs.audited_client import DataConfig, prepare
from dosimeter.types import Refused

QUICK = {"labels": ["idlg", "ilrg"], "features": [], "maps": [], "attacks": [dm.attack("inverting_gradients", steps=3)]}


def test_the_whole_suite_on_objects(classifier, batch, tmp_path):
    report = dm.audit(classifier, batch, **QUICK)
    assert [record.method for record in report.records] == ["idlg", "ilrg", "inverting_gradients"]
    assert {verdict.surface for verdict in report.verdicts} == {"labels", "inputs"}
    path = report.save(tmp_path / "out")
    assert path.read_text(encoding="utf-8").count("inverting_gradients") >= 1
    assert [record.key for record in read_records(tmp_path / "out")] == [record.key for record in report.records]


def test_attacks_build_on_recovered_labels_unless_given(classifier, batch):
    recovered = dm.audit(classifier, batch, **QUICK).records[-1]
    given = dm.audit(classifier, batch, attack_labels="given", **QUICK).records[-1]
    assert (recovered.threat_model["labels"], given.threat_model["labels"]) == ("recovered by ilrg", "given")


def test_a_killed_audit_resumes_without_repeating(tmp_path):
    subject = prepare(ModelConfig(), DataConfig(name="digits", batch_size=2))
    suite = Suite(methods={"labels": tuple(map(dm.label_recovery, ("idlg", "ilrg", "llg"))), "features": (), "maps": (), "attacks": ()})

    def kill_at_the_third(progress):
        if progress.position == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_suite(subject, suite, out=tmp_path, progress=kill_at_the_third)
    left = (tmp_path / FILE_NAME).read_bytes()
    assert len(left.splitlines()) == 2
    (tmp_path / FILE_NAME).write_bytes(left + b'{"key": "torn')
    seen = []
    result = run_suite(subject, suite, out=tmp_path, progress=lambda progress: seen.append(progress.method))
    assert set(seen) == {"llg"}
    assert [record.method for record in result.records] == ["idlg", "ilrg", "llg"]
    assert (tmp_path / FILE_NAME).read_bytes().startswith(left)
    assert len(read_records(tmp_path)) == 3


def test_a_crash_is_recorded_and_tried_again(classifier, batch, tmp_path, monkeypatch):
    from dosimeter.labels.idlg import IDLG

    monkeypatch.setattr(IDLG, "__call__", lambda *_: 1 / 0)
    crashed = dm.audit(classifier, batch, out=tmp_path, **QUICK)
    assert [record.outcome for record in crashed.records][:2] == ["crashed", "completed"]
    assert "ZeroDivisionError" in crashed.records[0].reason
    assert crashed.verdicts[0].method == "ilrg"
    monkeypatch.undo()
    assert dm.audit(classifier, batch, out=tmp_path, **QUICK).records[0].outcome == "completed"


def test_what_is_not_attempted_is_a_finding(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    report = dm.audit(model, batch, labels=["ilrg"], features=[], maps=[], attacks=[])
    assert [(v.surface, v.verdict) for v in report.verdicts] == [("labels", "not attempted")]
    assert "the last layer has no bias" in report.verdicts[0].reason


def test_a_zero_update_is_impossible_on_every_surface_and_names_its_theorem(dead_classifier, batch):
    report = dm.audit(dead_classifier, batch, labels=["ilrg"], features=["subspace"], attacks=["dlg"])
    assert {"labels", "features", "inputs"} <= {verdict.surface for verdict in report.verdicts}
    assert {verdict.verdict for verdict in report.verdicts} == {"impossible here"}
    assert all("random samples with random labels give the same zero" in record.details["theorem"] for record in report.records)


def test_a_zero_update_that_tells_the_labels_is_not_called_impossible(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([500.0] + [0.0] * 9))
    sure = dm.Batch(batch.inputs, torch.zeros_like(batch.targets))
    report = dm.audit(model, sure, labels=["ilrg"], features=["subspace"], attacks=["dlg"])
    assert {verdict.verdict for verdict in report.verdicts} == {"not attempted"}
    assert all("the zero tells something of the batch" in record.reason for record in report.records)


def test_several_labels_a_sample_are_counted_each(classifier, batch):
    targets = torch.zeros(len(batch.inputs), 10)
    targets[:, 2] = targets[:, 7] = 1.0
    report = dm.audit(classifier, dm.Batch(batch.inputs, targets), loss="binary_cross_entropy", **QUICK)
    refused, counted = (record for record in report.records if record.surface == "labels")
    assert (refused.method, refused.verdict) == ("idlg", "not attempted")
    recovered, true = torch.tensor(counted.details["counts"]), targets.sum(0)
    assert counted.metrics["insacc"] == [pytest.approx(float(torch.minimum(recovered, true).sum() / torch.maximum(recovered, true).sum()))]
    right = ((classifier.eval()(batch.inputs) > 0) == (targets > 0)).all(1).float().mean()
    assert counted.threat_model["accuracy"] == float(right)


def test_all_means_every_passive_method(classifier, batch, monkeypatch):
    from dosimeter.interfaces import ActiveAttack
    from dosimeter.registry import ATTACKS, LABELS
    from dosimeter.runs import audit as module

    chosen = module.choose_methods(ATTACKS, "all", "quick")
    assert {"dlg", "inverting_gradients"} <= {attack.name for attack in chosen}
    assert not any(isinstance(attack, ActiveAttack) for attack in chosen)
    assert all(getattr(attack, option) == value for attack in chosen for option, value in attack.quick.items())
    assert {"idlg", "ilrg"} <= {recovery.name for recovery in module.choose_methods(LABELS, "all", "published")}


def test_an_active_attack_that_is_named_changes_the_model_before_it_is_sent(classifier, batch):
    kept = {name: value.clone() for name, value in classifier.state_dict().items()}
    target = int(batch.targets[0])
    named = [dm.attack("imprint", bins=200), dm.attack("gradfilt", targets=(target,), steps=30)]
    imprint, gradfilt = dm.audit(classifier, batch, labels=["ilrg"], features=[], maps=[], attacks=named).records[1:]
    assert imprint.verdict == "leaked"
    assert float(torch.tensor(imprint.metrics["psnr"]).max()) > 40
    assert gradfilt.outcome == "completed"
    assert "objective_at_truth" not in gradfilt.details
    assert all(torch.equal(value, kept[name]) for name, value in classifier.state_dict().items())
    counted, ilrg = dm.audit(classifier, batch, labels=["gradfilt", "ilrg"], features=[], maps=[], attacks=[]).records
    assert counted.metrics["insacc"] == [1.0]
    assert counted.verdict == "leaked"
    assert ilrg.config["labels"]["name"] == "ilrg"
    built_on = dm.audit(classifier, batch, labels=["gradfilt"], features=[], maps=[], attacks=[dm.attack("dlg", steps=5)]).records[1]
    assert built_on.config["labels"] == "optimised"
    twice = dm.audit(named[0].tamper(classifier), batch, labels=[], features=[], maps=[], attacks=named[:1]).records
    assert "has an inserted layer already" in twice[0].reason


@pytest.mark.parametrize("labels", [[3, 3], [3] * 8, [3] * 6 + [1, 2], list(range(10))], ids=str)
def test_pure_noise_leaks_no_labels(labels):
    """Behind noise that drowns the gradient no label counts as leaked, however many methods try and however labels repeat."""
    leaked = 0
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
        batch = dm.Batch(torch.rand(len(labels), 1, 8, 8), torch.tensor(labels))
        fast = ["idlg", "gradinversion", "ilrg", "llg", "subspace"]
        noise = dm.defense("gaussian_noise", std=100.0)
        report = dm.audit(model, batch, defenses=[noise], labels=fast, features=[], maps=[], attacks=[], seed=seed)
        leaked += report.verdicts[0].verdict == "leaked"
    assert leaked <= 1


def test_methods_may_be_named_or_stand_alone(classifier, batch):
    report = dm.audit(
        classifier,
        batch,
        training="fedavg",
        loss="focal",
        defenses="sign",
        labels=dm.label_recovery("idlg"),
        features=[],
        maps=[],
        attacks=[],
    )
    threat = report.records[0].threat_model
    assert (threat["training"]["name"], threat["loss"]["name"], threat["defenses"][0]["name"]) == ("fedavg", "focal", "sign")


def test_dropout_leaves_certificates_but_no_measured_error(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)).train()
    report = dm.audit(model, batch, labels=[], features=["subspace"], maps=[], attacks=[])
    (record,) = report.records
    assert record.metrics == {}
    assert "cannot be measured" in record.reason


def test_what_observe_refuses_audit_refuses(classifier, batch):
    for wrong in (dm.Batch((batch.inputs * 255).long(), batch.targets), dm.Batch(batch.inputs[0, 0, 0], batch.targets)):
        with pytest.raises(ValueError, match=r"^batch.inputs: "):
            dm.audit(classifier, wrong)
    for wrong in ((batch.inputs, batch.targets), dm.Batch(batch.inputs.numpy(), batch.targets.numpy())):
        with pytest.raises(TypeError, match=r"^batch: expected"):
            dm.audit(classifier, wrong)


def test_refusals(classifier, batch, tmp_path):
    no_head = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    with pytest.raises(Refused, match="has no linear layer"):
        dm.audit(no_head, batch, labels=["ilrg"], features=[], maps=[], attacks=[], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert dm.audit(
        no_head, batch, labels=[], features=[], maps=[], attacks=[dm.attack("inverting_gradients", steps=2)], attack_labels="given"
    ).records
    with pytest.raises(ValueError, match="nothing to audit"):
        dm.audit(classifier, batch, labels=[], features=[], maps=[], attacks=[])
    with pytest.raises(ValueError, match="did you mean 'attacks'"):
        dm.audit(classifier, batch, attack=["dlg"])
    with pytest.raises(ValueError, match="maps: expected"):
        Suite(methods={"maps": (dm.attack("dlg"),)})
    with pytest.raises(ValueError, match="no such surface"):
        Suite(methods={"sounds": ()})
    with pytest.raises(ValueError, match="no attack named 'ig'"):
        dm.audit(classifier, batch, attacks=["ig"])
    dm.audit(classifier, batch, out=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="records of another model or batch"):
        dm.audit(classifier, dm.Batch(batch.inputs.flip(0), batch.targets.flip(0)), out=tmp_path, **QUICK)


def test_the_callers_model_and_batch_stay_as_they_were(normed_classifier, batch):
    model = normed_classifier.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = batch.inputs.clone()
    dm.audit(model, batch, **QUICK)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(inputs, batch.inputs)


def test_methods_of_the_wrong_type_are_refused_in_a_sentence(classifier, batch):
    with pytest.raises(TypeError, match="attacks: expected 'all', a name, a method or a list of these, got 3"):
        dm.audit(classifier, batch, attacks=3)
