"""Audits of received updates: what is proved without the truth, nothing scored; and scores where the truth is handed over."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.models.loading import load_model
from dosimeter.records import read_records
from dosimeter.surfaces.verdicts import Verdict

STEP = dm.FedAvg(learning_rate=0.1, steps=1)
FAST = {"labels": ["ilrg", "subspace"], "features": ["subspace"], "maps": [], "attacks": [dm.attack("inverting_gradients", steps=20)]}
SOME = {"labels": ["llg_star", "subspace", "zlg"], "features": ["subspace"], "attacks": []}


def after_step(model: nn.Module, images, labels) -> dict:
    client = copy.deepcopy(model)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
    cross_entropy(client(images), labels).backward()
    optimizer.step()
    return client.state_dict()


@pytest.fixture
def exposure(classifier, batch):
    sent = after_step(classifier, batch.inputs[:3], batch.targets[:3])
    return dm.receive(classifier, sent, kind="weights", training=STEP, batch_size=3, input_shape=(1, 8, 8))


def test_without_truth_proofs_stand_and_nothing_is_scored(exposure, batch, tmp_path):
    report = dm.audit(exposure=exposure, **FAST, out=tmp_path)
    verdicts = {verdict.surface: verdict for verdict in report.verdicts}
    assert verdicts["labels"].verdict == verdicts["features"].verdict == Verdict.PROVED
    assert verdicts["inputs"].verdict == Verdict.UNVERIFIED
    counted = ", ".join(f"class {label} (1)" for label in sorted(batch.targets[:3].tolist()))
    assert verdicts["labels"].reason == f"3 of 3 labels proved from the update alone: {counted}"
    assert all(record.metrics == {} and record.nulls == {} for record in report.records)
    assert all("truth" not in json.dumps(record.evidence) and "insacc" not in json.dumps(record.details) for record in report.records)
    page = report.save(tmp_path).read_text(encoding="utf-8")
    assert "proved from the update alone, without the private samples" in page
    assert "unverified" in page
    assert "dB" not in page.partition("How to read this page</h2>")[0]  # no score of inputs
    again = dm.audit(exposure=exposure, **FAST, out=tmp_path)
    assert again.resumed == len(again.records) == len(read_records(tmp_path))


def test_the_answer_that_explains_the_update_best_stands_first(exposure):
    attacks = [dm.attack("inverting_gradients", steps=steps) for steps in (1, 40)]
    report = dm.audit(exposure=exposure, labels=["ilrg"], features=[], maps=[], attacks=attacks)
    inputs = [record for record in report.records if record.surface == "inputs"]
    best = min(inputs, key=lambda record: record.details["misfit"])
    (verdict,) = (verdict for verdict in report.verdicts if verdict.surface == "inputs")
    assert len({record.details["misfit"] for record in inputs}) == 2
    assert verdict.reason == best.reason
    assert f"explains the update up to {best.details['misfit']:.2g} of its norm" in verdict.reason


def test_with_truth_it_is_scored(exposure, batch):
    truth = dm.Batch(batch.inputs[:3], batch.targets[:3])
    report = dm.audit(exposure=exposure, truth=truth, **FAST)
    verdicts = {verdict.surface: verdict for verdict in report.verdicts}
    assert verdicts["labels"].verdict == verdicts["features"].verdict == Verdict.LEAKED
    (inputs,) = (record for record in report.records if record.surface == "inputs")
    assert len(inputs.metrics["psnr"]) == 3
    assert "foreign" in inputs.nulls
    assert inputs.threat_model["truth"].endswith("has the cosine 1 with the received one")


def test_the_truth_plays_no_part_in_the_recovery(exposure, batch):
    """The same estimates with and without the truth: records agree in all that does not come from scores."""
    blind = dm.audit(exposure=exposure, **FAST)
    seeing = dm.audit(exposure=exposure, truth=dm.Batch(batch.inputs[:3], batch.targets[:3]), **FAST)
    for one, other in zip(blind.records, seeing.records, strict=True):
        assert (one.method, one.outcome) == (other.method, other.outcome)
        for name in ("counts", "objective", "certified", "proved"):
            assert one.details.get(name) == other.details.get(name)


def test_samples_of_another_client_are_refused_as_truth(exposure, batch):
    other = dm.Batch(batch.inputs[3:6], batch.targets[3:6])
    with pytest.raises(ValueError, match="truth: these are not the samples behind the update"):
        dm.audit(exposure=exposure, truth=other)
    with pytest.raises(ValueError, match=r"truth\.inputs: expected 3 samples"):
        dm.audit(exposure=exposure, truth=batch)


def test_what_the_exposure_says_is_not_said_again(exposure, classifier, batch):
    for wrong in ({"model": classifier}, {"training": dm.FedSGD()}, {"declare_batch_size": False}):
        with pytest.raises(ValueError, match="exposure: expected no model, batch or protocol beside it"):
            dm.audit(exposure=exposure, **wrong)
    with pytest.raises(ValueError, match="attack_labels: 'given' needs the private labels"):
        dm.audit(exposure=exposure, attack_labels="given")
    with pytest.raises(ValueError, match="truth: expected it beside an exposure"):
        dm.audit(classifier, batch, truth=batch)
    with pytest.raises(TypeError, match="expected a model and a batch, or an exposure"):
        dm.audit(classifier)


def test_an_active_attack_is_not_attempted(exposure):
    report = dm.audit(exposure=exposure, labels=[], features=[], maps=[], attacks=[dm.attack("trap_weights")])
    assert report.verdicts[0].verdict == Verdict.NOT_ATTEMPTED
    assert "cannot be attacked by changing the model" in report.verdicts[0].reason


@pytest.fixture
def lenet(digits):
    images = digits[0].repeat_interleave(2, 2).repeat_interleave(2, 3)
    return load_model("lenet5", {"classes": 10, "channels": 1, "size": 16}, None, 3), images, digits[1]


WORDS = ["--model", "lenet5", "model.size=16", "attacks=[]", "maps=[]", "features=['subspace']", "labels=['subspace', 'ilrg']"]


def test_a_capture_on_the_command_line(lenet, tmp_path, capsys):
    model, images, labels = lenet
    sent = after_step(model, images[:3], labels[:3])
    facts = {"kind": "weights", "training": STEP, "batch_size": 3, "round": 2, "client": "9", "input_shape": (1, 16, 16)}
    path = dm.write_capture(tmp_path / "captures", sent, before=model.state_dict(), **facts)
    out = ["--out", str(tmp_path / "out")]
    assert main(["audit", *WORDS, "--capture", str(path), *out]) == 0
    said = capsys.readouterr().out
    assert "labels: proved (subspace): 3 of 3 labels proved from the update alone: class 0 (1), class 1 (1), class 2 (1)" in " ".join(
        said.split()
    )
    assert "insacc" not in said
    assert main(["audit", *WORDS, "--capture", str(path), *out, "--fail-on", "labels.leaked"]) == 1
    assert "labels proved" in capsys.readouterr().err
    assert main(["audit", *WORDS, "--capture", str(path), *out, "--fail-on", "labels.insacc.median > 0.5"]) == 2
    records = read_records(tmp_path / "out")
    assert {record.threat_model["data"] for record in records} == {"an update of round 2, client 9"}


def test_weights_before_and_after_on_the_command_line(lenet, tmp_path, capsys):
    model, images, labels = lenet
    save_file(model.state_dict(), tmp_path / "before.safetensors")
    save_file(after_step(model, images[:3], labels[:3]), tmp_path / "after.safetensors")
    files = [
        "--before",
        str(tmp_path / "before.safetensors"),
        "--after",
        str(tmp_path / "after.safetensors"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["audit", *WORDS, *files, "batch_size=3"]) == 2
    assert "needs the client's learning rate and steps" in capsys.readouterr().err
    words = [*WORDS, "training=fedavg", "training.learning_rate=0.1", "training.steps=1", "batch_size=3", "input_shape=[1, 16, 16]"]
    assert main(["audit", *words, *files]) == 0
    assert "labels: proved" in capsys.readouterr().out
    assert main(["audit", *words, *files, "kind=gradient"]) == 2
    assert "looks like the weights after training" in capsys.readouterr().err


def test_truth_on_the_command_line(lenet, tmp_path, capsys):
    import numpy as np

    model, images, labels = lenet
    save_file(model.state_dict(), tmp_path / "before.safetensors")
    save_file(after_step(model, images[:3], labels[:3]), tmp_path / "after.safetensors")
    np.savez(tmp_path / "private.npz", images=images[:3].permute(0, 2, 3, 1).numpy(), labels=labels[:3].numpy())
    words = [*WORDS, "training=fedavg", "training.learning_rate=0.1", "training.steps=1", "input_shape=[1, 16, 16]"]
    files = [
        "--before",
        str(tmp_path / "before.safetensors"),
        "--after",
        str(tmp_path / "after.safetensors"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["audit", *words, *files, "--truth", str(tmp_path / "private.npz")]) == 0
    said = capsys.readouterr().out
    assert "labels: leaked" in said
    assert "insacc" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--capture", "missing.safetensors"], "missing.safetensors: no such file"),
        (["--before", "x.safetensors"], "expected a capture, or the weights before and after"),
        (["--after", "missing.safetensors"], "no file missing.safetensors"),
        (["--capture", "x", "--defenses", "all"], "--defenses: expected no received update beside it"),
    ],
)
def test_refusals_on_the_command_line(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "--model", "lenet5", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_model_than_the_captured_one_is_refused(lenet, tmp_path, capsys):
    model, images, labels = lenet
    path = dm.write_capture(
        tmp_path / "one", after_step(model, images[:3], labels[:3]), before=model.state_dict(), kind="weights", training=STEP
    )
    next((tmp_path / "one").glob("model-*")).unlink()
    assert main(["audit", *WORDS, "--capture", str(path)]) == 2
    assert "the weights that the server sent are missing; pass --before" in capsys.readouterr().err
    save_file({name: tensor + 1e-3 for name, tensor in model.state_dict().items()}, tmp_path / "other.safetensors")
    assert main(["audit", *WORDS, "--capture", str(path), "--before", str(tmp_path / "other.safetensors")]) == 2
    assert "is not the model that was sent" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [0, 1])
def test_a_quickstart_client_is_audited_without_a_false_proof(seed, digits):
    """Momentum, a shuffled loader, batch norm and the whole state dict, by hand: nothing false is proved, and labels beat guessing."""
    images, labels = digits
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)
    ).train()
    chosen = torch.randperm(len(images))[:24]
    client = copy.deepcopy(model)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.01, momentum=0.9)
    for inputs, targets in DataLoader(TensorDataset(images[chosen], labels[chosen]), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(client(inputs), targets).backward()
        optimizer.step()
    training = dm.FedAvg(learning_rate=0.01, momentum=0.9, mini_batch=8)
    exposure = dm.receive(model, client.state_dict(), kind="weights", training=training, batch_size=24)
    report = dm.audit(exposure=exposure, **SOME)
    assert Verdict.PROVED not in {verdict.verdict for verdict in report.verdicts}  # several steps: no theorem of one gradient applies
    scored = dm.audit(exposure=exposure, truth=dm.Batch(images[chosen], labels[chosen]), **SOME)
    assert all(not record.details.get("false_certificates") for record in scored.records)
    (zlg,) = (record for record in scored.records if record.method == "zlg")
    assert zlg.metrics["insacc"][0] > zlg.nulls["prior"]["insacc"][0] + 0.1
