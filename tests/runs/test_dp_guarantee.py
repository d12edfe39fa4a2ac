"""The ε that was typed beside the ε that holds: in an audit, its record and report, in captures and on the command line."""

import copy
import json

import pytest
import torch

import dosimeter as dm
from dosimeter.captures.capture import Capture, read_facts, write_facts
from dosimeter.cli import main
from dosimeter.records import read_records

LOCAL = {"clipping_norm": 1.0, "sensitivity": 0.5, "epsilon": 1.0, "delta": 1e-5}
NONE = {"labels": ["ilrg"], "features": [], "maps": [], "attacks": [], "ceilings": False}


def noisy_state(model, batch, setting):
    """What a client behind Flower's mod sends: one step of SGD, clipped, with noise."""
    client = copy.deepcopy(model)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(client(batch.inputs), batch.targets).backward()
    optimizer.step()
    rng = torch.Generator().manual_seed(1)
    change = {name: value - model.state_dict()[name] for name, value in client.state_dict().items()}
    norm = torch.stack([value.norm() for value in change.values()]).norm()
    factor = min(1.0, setting.clipping_norm / float(norm))
    return {
        name: model.state_dict()[name] + factor * value + setting.deviation * torch.randn(value.shape, generator=rng)
        for name, value in change.items()
    }


def test_an_audit_sets_each_epsilon_beside_the_attacks(classifier, batch, tmp_path):
    setting = dm.privacy("flower_local_dp", **LOCAL)
    report = dm.audit(classifier, batch, privacy=setting, rounds=3, out=tmp_path, **NONE)
    (record,) = read_records(tmp_path)
    client, sample = record.threat_model["privacy"]
    assert (client["stated"], client["rounds"], client["unit"], sample["unit"]) == (1.0, 3, "client", "sample")
    assert client["proved"] == setting.readings(3)[0].proved > 1
    assert [one["name"] for one in record.threat_model["defenses"]] == ["clipping", "gaussian_noise"]
    page = report.save(tmp_path).read_text(encoding="utf-8")
    assert "The ε that was typed, and the ε that holds" in page
    again = dm.audit(classifier, batch, privacy=setting, rounds=3, out=tmp_path, **NONE)
    assert again.resumed == 1


def test_a_capture_keeps_the_setting_and_declares_what_it_does(classifier, batch):
    setting = dm.privacy("flower_local_dp", **LOCAL)
    sent = noisy_state(classifier, batch, setting)
    training = dm.FedAvg(learning_rate=0.1, steps=1)
    facts = {"kind": "weights", "training": training, "batch_size": len(batch.targets), "input_shape": (1, 8, 8), "privacy": setting}
    capture = Capture(update=sent, **facts)
    assert read_facts(write_facts(capture)) == capture.facts
    exposure = capture.receive(classifier)
    clipping, noise = exposure.public.defenses
    assert (clipping.name, noise.name) == ("clipping", "gaussian_noise")
    assert clipping.max_norm == pytest.approx(1.0 / 0.1)
    assert noise.std == pytest.approx(setting.deviation / 0.1)
    estimate = dm.recover_labels(exposure, "subspace")
    assert not estimate.certified or sorted(estimate.labels.tolist()) == sorted(batch.targets.tolist())


def test_behind_a_filter_without_a_model_nothing_is_proved(classifier, batch):
    client = copy.deepcopy(classifier)
    torch.nn.functional.cross_entropy(client(batch.inputs), batch.targets).backward()
    sent = {name: -0.1 * parameter.grad for name, parameter in client.named_parameters()}
    training = dm.FedAvg(learning_rate=0.1, steps=1)
    facts = {"kind": "difference", "training": training, "batch_size": len(batch.targets), "input_shape": (1, 8, 8)}
    assert dm.recover_labels(Capture(update=sent, **facts).receive(classifier, check_kind=False), "subspace").certified
    behind = Capture(update=sent, privacy=dm.privacy("nvflare_svt", parameters=100), **facts).receive(classifier)
    assert [defense.name for defense in behind.public.defenses] == ["unmodelled"]
    assert not dm.recover_labels(behind, "subspace").certified


def test_an_older_capture_is_still_read():
    facts = read_facts(json.dumps({"format": 1, "kind": "weights"}))
    assert facts.privacy is None


def test_on_the_command_line(capsys):
    words = ["privacy", "flower_local_dp", *(f"{name}={value}" for name, value in LOCAL.items())]
    assert main([*words, "--rounds", "4"]) == 0
    said = capsys.readouterr().out
    assert "flower_local_dp" in said
    assert "4 rounds" in said
    assert main([*words, "--json", "--trials", "500"]) == 0
    readings = json.loads(capsys.readouterr().out)["readings"]
    assert readings[0]["stated"] == 1.0
    assert readings[0]["proved"] > 1.0
    assert main(["privacy", "flower_local_dp", "epsilon=-1"]) == 2
    assert "privacy_setting" in capsys.readouterr().err


def test_in_a_file(tmp_path, capsys):
    words = ["data.batch_size=2", "model=fcn3", 'labels=["ilrg"]', "features=[]", "maps=[]", "attacks=[]", "rounds=2", "ceilings=false"]
    words += ["privacy=nvflare_svt", "privacy.parameters=1000", "--out", str(tmp_path)]
    assert main(["audit", *words]) == 0
    assert "ε of a client exchanged, against the server: stated 0.100" in capsys.readouterr().out
    (record,) = read_records(tmp_path)
    reading = record.threat_model["privacy"][0]
    assert (reading["rounds"], reading["behind"], record.threat_model["defenses"]) == (2, False, [])
    assert "not run behind it" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_grid_of_defenses_takes_no_setting(capsys):
    assert main(["audit", "--defenses", "gaussian_noise", "privacy=nvflare_percentile"]) == 2
    assert "privacy: expected no grid of defenses beside it" in capsys.readouterr().err
