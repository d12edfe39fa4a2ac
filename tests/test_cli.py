import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dosimeter.cli import main
from dosimeter.engines.needs import ZERO_THEOREM, ZERO_UPDATE
from dosimeter.version import __version__

FAST = ["labels=ilrg", "data.name=digits", "data.batch_size=2"]


def test_help_does_not_import_torch():
    code = "import sys\nfrom dosimeter.cli import main\ntry: main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "audit" in done.stdout


def test_run_prints_a_record(capsys):
    assert main(["run", *FAST, "seed=3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["method"], record["seed"], record["metrics"]["insacc"]) == ("ilrg", 3, [1.0])
    assert "evidence" not in record


def test_run_reads_toml_and_overrides(tmp_path, capsys):
    file = tmp_path / "experiment.toml"
    file.write_text('labels = "given"\n[attack]\nname = "inverting_gradients"\nsteps = 500\n[data]\nname = "digits"\nbatch_size = 2\n')
    assert main(["run", str(file), "attack.steps=2", "--json", "--out", str(tmp_path / "out")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["attack"]["steps"] == 2
    assert main(["report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/report.html").is_file()


def test_audit_writes_records_and_report(tmp_path, capsys):
    words = ["data.name=digits", 'labels=["idlg", "ilrg"]', "features=[]", "maps=[]", 'attacks=[{name="inverting_gradients", steps=2}]']
    assert main(["audit", *words, "--out", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [record["method"] for record in answer["records"]] == ["idlg", "ilrg", "inverting_gradients"]
    assert Path(answer["report"]).is_file()
    assert main(["audit", *words, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "labels: leaked" in shown.out
    assert "inverting_gradients" in shown.out
    assert f"resumed: 3 of 3 records were in {tmp_path} already" in shown.err


def test_list_names_everything(capsys):
    assert main(["list", "--json"]) == 0
    entries = {(entry["kind"], entry["name"]): entry for entry in json.loads(capsys.readouterr().out)}
    ilrg = entries["labels", "ilrg"]
    assert "head gradient" in ilrg["needs"]
    assert {"name": "as_published", "type": "true or false", "required": False, "default": False} in ilrg["options"]
    assert not [option for entry in entries.values() for option in entry["options"] if " at 0x" in str(option)]
    assert ("models", "resnet18") in entries
    assert ("data", "digits") in entries
    assert entries["defenses", "pruning"]["promise"] == "nothing: the surviving entries are exact"
    assert main(["list", "defenses"]) == 0
    shown = capsys.readouterr().out
    assert "promises: (ε, δ) for each sample" in shown
    assert "breaks: accuracy at small ε" in shown
    assert main(["list", "labels"]) == 0
    assert "ilrg" in capsys.readouterr().out


def test_own_model_weights_and_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("hospital_net.py").write_text(
        "from torch import nn\n\ndef build(hidden=16):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, hidden), nn.ReLU(), nn.Linear(hidden, 3))\n"
    )
    rng = np.random.default_rng(0)
    for name in ("benign", "malign", "unsure"):
        Path("scans", name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(Path("scans", name, f"{i}.png"))
    weights = {"1.weight": torch.randn(8, 768) / 30, "1.bias": torch.zeros(8), "3.weight": torch.randn(3, 8), "3.bias": torch.zeros(3)}
    save_file(weights, "net.safetensors")
    words = [
        "model.name=hospital_net:build",
        "model.hidden=8",
        "model.weights=net.safetensors",
        "data.name=scans",
        "labels=ilrg",
        "data.auxiliary=0",
    ]
    assert main(["run", *words, "--json"]) == 0
    threat = json.loads(capsys.readouterr().out)["threat_model"]
    assert (threat["model"], threat["stage"], threat["data"]) == ("hospital_net:build", "weights from net.safetensors", "scans")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "labels=ilgr"], "no label recovery named 'ilgr'; did you mean 'ilrg'?"),
        (["run", *FAST, "attack=dlg", "attack.steps=-3"], "attack.steps: expected a positive int, got -3"),
        (["run", *FAST, "attack=dlg", "attack.stepz=3"], "attack: unknown option 'stepz'; did you mean 'steps'?"),
        (["run", *FAST, "atack=dlg"], "atack: no such key; did you mean 'attack'?"),
        (["run", *FAST, "seed=x"], "seed: expected an int, got 'x'"),
        (["run", "missing.toml"], "missing.toml: no such file"),
        (["run", "labels=ilrg", "data.name=no/such/folder"], "no/such/folder"),
        (["run", "labels=ilrg", "data.name=digitz"], "did you mean 'digits'?"),
        (["run", *FAST, "model.name=resnet19"], "model"),
        (["run", *FAST, "model=no_module:build"], "no_module"),
        (["run", *FAST, "model=os:system", "model.command=touch x"], "'os:system' is in Python's standard library"),
        (["run", *FAST, "model.weights=none.pt"], "none.pt"),
        (["run", *FAST, "data.batch_size=0"], "data.batch_size: expected a positive int, got 0"),
        (["run", *FAST, "data.batch_size=100000"], "100000"),
        (["run", *FAST, "model.head_bias=false"], "the last layer has no bias"),
        (["audit", "labels=idlg"], "labels"),
        (["run", *FAST, "device=cudaa"], "device: 'cudaa' cannot be used here"),
        (["run", *FAST, "--checkpoint-every", "-1"], "checkpoint_every: expected seconds, 0 or more, got -1.0"),
        (["run", *FAST, "--checkpoint-every", "nan"], "checkpoint_every: expected seconds, 0 or more, got nan"),
        (["report", "no-such-folder"], "no records there"),
    ],
)
def test_bad_input_gets_one_sentence_and_nothing_is_written(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert output.err.startswith("dosimeter: ")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (Path.touch, "a file")])
def test_what_is_no_folder_is_no_place_for_records(make, kind, tmp_path, capsys):
    place = tmp_path / "place"
    make(place)
    for command in (["run", *FAST], ["audit", "data.name=digits", 'labels=["idlg"]', "features=[]", "maps=[]", "attacks=[]"]):
        assert main([*command, "--out", str(place)]) == 2
        assert capsys.readouterr().err == f"dosimeter: {place}: expected a folder to write to, got {kind}; choose another\n"


def test_a_missing_decoder_is_a_refusal_of_its_attack_alone(tmp_path, capsys):
    attacks = f'attacks=[{{name="fgla", decoder="{tmp_path}/none.safetensors"}}]'
    words = ["data.name=digits", 'labels=["idlg"]', "features=[]", "maps=[]", attacks]
    assert main(["audit", *words, "--out", str(tmp_path / "out"), "--json"]) == 0
    _, record = json.loads(capsys.readouterr().out)["records"]
    assert record["outcome"] == "not attempted"
    assert record["reason"].startswith(f"decoder: no file {tmp_path}/none.safetensors")


def test_words_may_stand_after_options(capsys):
    assert main(["run", "labels=ilrg", "--json", "data.name=digits", "data.batch_size=2"]) == 0
    assert json.loads(capsys.readouterr().out)["threat_model"]["batch_size"] == 2
    with pytest.raises(SystemExit, match="2"):
        main(["run", "labels=ilrg", "--jsn"])


@pytest.mark.parametrize(("answer", "sentence"), [("'x'", "got str"), ("x.no_such_thing", "no_such_thing")])
def test_a_strange_model_gets_a_sentence(answer, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("strange_net.py").write_text(
        "from torch import nn\n\nclass Strange(nn.Linear):\n    def forward(self, x):\n        x = super().forward(x.flatten(1))\n"
        f"        return {answer}\n\ndef build():\n    return Strange(64, 10)\n"
    )
    sys.modules.pop("strange_net", None)
    assert main(["run", *FAST, "model.name=strange_net:build"]) == 2
    imported, failed = capsys.readouterr().err.splitlines()
    assert imported == f"dosimeter: imports strange_net from {tmp_path / 'strange_net.py'}"
    assert sentence in failed


def test_double_precision_models_are_audited(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("double_net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()\n"
    )
    assert main(["run", *FAST, "model.name=double_net:build", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["insacc"] == [1.0]


def own_network(name, body):
    Path(f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{body}")
    sys.modules.pop(name, None)
    return ["run", "labels=given", "data.name=digits", "data.batch_size=2", "attack=dlg", "attack.steps=20", f"model.name={name}:build"]


def test_half_precision_models_are_attacked_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = own_network("bfloat_net", "def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).bfloat16()\n")
    assert main([*words, "--out", "out", "--checkpoint-every", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["outcome"] == "completed"
    assert "replayed in single precision" in record["details"]["message"]


def test_why_an_attack_could_not_run_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = own_network("certain_net", CERTAIN)
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"\ndosimeter: {ZERO_UPDATE}: {ZERO_THEOREM}\n")


CERTAIN = """
class Certain(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.flatten(1)) * 0

def build():
    return Certain(64, 10)
"""


def test_an_attack_that_an_error_stopped_is_not_measured_and_ends_with_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = own_network("plain_net", "def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n")
    assert main([*words, "attack.history=1000000000000", "attack.steps=1000000000000"]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("inputs: not measured (dlg): out of memory")
    assert "median" not in shown


def test_a_truncated_weights_file_is_said(tmp_path, capsys):
    file = tmp_path / "broken.safetensors"
    file.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    assert main(["run", *FAST, f"model.weights={file}"]) == 2
    assert "broken.safetensors" in capsys.readouterr().err


def test_inspect_tells_clean_from_rigged(tmp_path, capsys):
    from dosimeter import attack
    from dosimeter.models.loading import load_model

    model = load_model("small_cnn", {"size": 8, "channels": 1}, None, 0)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "honest.safetensors")
    rigged = attack("gradfilt", targets=(3,)).tamper(model)
    save_file({name: value.contiguous() for name, value in rigged.state_dict().items()}, tmp_path / "rigged.safetensors")
    words = ["inspect", "small_cnn", "model.size=8", "model.channels=1"]
    assert main([*words, f"model.weights={tmp_path / 'honest.safetensors'}"]) == 0
    assert "no sign of tampering" in capsys.readouterr().out
    assert main([*words, f"model.weights={tmp_path / 'rigged.safetensors'}", "--json", "--data", "digits"]) == 1
    assert json.loads(capsys.readouterr().out)["suspicious"] is True
    assert main(["inspect", "no_such_model"]) == 2


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dosimeter", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dosimeter {__version__}\n"
