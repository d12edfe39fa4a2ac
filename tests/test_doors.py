"""What a stranger's folder, file or record may do to a command, and how each command ends: through the command line alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dosimeter.cli import main
from dosimeter.network.probing import FAILED_MODEL
from dosimeter.records import FILE_NAME, LOCK_NAME, lock_folder, read_records

DIGITS = ["data.name=digits", "data.batch_size=2"]
LABELS = ["audit", *DIGITS, 'labels=["idlg", "ilrg"]', "features=[]", "maps=[]", "attacks=[]"]
STRANGER = '[model]\nname = "{name}"\n{options}\n[data]\nname = "digits"\nbatch_size = 2\n'
NETWORK = "from torch import nn\nopen('trace', 'w').close()\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange_model.py").write_text(NETWORK)
    yield tmp_path
    sys.modules.pop("strange_model", None)


def commands(file):
    yield ["inspect", file]
    yield ["audit", file, 'labels=["idlg"]', "features=[]", "maps=[]", "attacks=[]"]
    yield ["run", file, "labels=idlg"]
    yield ["generator", "train", file]


@pytest.mark.parametrize("name", ["os:system", "strange_model:build", "subprocess:call", "builtins:exec"])
def test_a_toml_alone_runs_nothing(name, folder, capsys):
    Path("audit.toml").write_text(STRANGER.format(name=name, options='command = "touch trace"'))
    before = sorted(folder.iterdir())
    for words in commands("audit.toml"):
        assert main(words) == 2, words
        assert "dosimeter: model: " in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_a_module_allowed_by_name_runs_and_is_announced(folder, capsys):
    Path("audit.toml").write_text(STRANGER.format(name="strange_model:build", options=""))
    assert main(["inspect", "audit.toml", "--allow-code", "other_model"]) == 2
    assert "--allow-code strange_model" in capsys.readouterr().err
    assert not Path("trace").exists()
    assert main(["run", "audit.toml", "labels=idlg", "--allow-code", "strange_model", "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == f"dosimeter: imports strange_model from {folder / 'strange_model.py'}\n"
    assert json.loads(output.out)["threat_model"]["model"] == "strange_model:build"


def test_a_model_named_on_the_command_line_is_allowed(folder, capsys):
    for words in (["model=strange_model:build"], ["model.name=strange_model:build"], ['model={name="strange_model:build"}']):
        assert main(["run", *DIGITS, "labels=idlg", *words]) == 0
    assert main(["inspect", "strange_model:build"]) in (0, 1)
    Path("audit.toml").write_text(STRANGER.format(name="strange_model:build", options=""))
    assert main(["run", "audit.toml", "labels=idlg", "model=other_model:build"]) == 2
    assert "cannot import 'other_model'" in capsys.readouterr().err


def test_tables_come_from_the_installation(folder, capsys):
    for place in ("papers/ilrg", "experiments/ilrg", "ilrg"):
        Path(place).mkdir(parents=True)
        Path(place, "figure3.toml").write_text('title = "a stranger\'s"\n')
        Path(place, "figure3").write_text('title = "a stranger\'s"\n')
    Path("ilrg/mine").write_text('title = "a stranger\'s"\n')
    assert main(["reproduce", "--json"]) == 0
    assert "stranger" not in capsys.readouterr().out
    assert main(["reproduce", "ilrg/mine"]) == 2
    assert "no such table" in capsys.readouterr().err
    assert main(["reproduce", "ilrg/figure3.toml"]) == 2  # a path on the command line is the user's own word
    assert "ilrg/figure3.toml: rows" in capsys.readouterr().err


def test_a_table_of_ones_own_runs_no_code_either(folder, capsys):
    Path("table.toml").write_text(
        '[[rows]]\nname = "x"\nrepeats = 1\ntolerance = 0.1\n[rows.model]\nname = "strange_model:build"\n'
        '[rows.data]\nname = "digits"\npart = "all"\nbatch_size = 2\n[rows.methods.ilrg]\nlabels = "ilrg"\n'
        "[rows.published.ilrg]\ninsacc = 1.0\n"
    )
    assert main(["reproduce", "table.toml"]) == 2
    assert "add --allow-code strange_model" in capsys.readouterr().err
    assert not Path("trace").exists()
    assert main(["reproduce", "table.toml", "--allow-code", "strange_model"]) == 0
    assert len(read_records(Path("dosimeter-reproduction", folder.name, "table"))) == 1


def test_local_files_shadow_no_installed_module(folder):
    for name in ("torchvision", "json", "torch", "safetensors", "typing", "__future__", "pickle", "random", "sitecustomize"):
        Path(f"{name}.py").write_text("open('trace', 'w').close()\n")
    for module in ("dosimeter", "dosimeter.cli"):
        done = subprocess.run([sys.executable, "-m", module, "list", "losses"], capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stderr) == (0, ""), module
        assert not Path("trace").exists()


def test_local_files_shadow_no_module_of_a_worker(folder):
    Path("pickle.py").write_text("open('trace', 'w').close()\n")
    words = ["models=['fcn3']", "data=['digits']", "batch_sizes=[2]", "labels=['idlg']"]
    done = subprocess.run([sys.executable, "-m", "dosimeter", "sweep", *words], capture_output=True, text=True, env=environment())
    assert (done.returncode, Path("trace").exists()) == (0, False), done.stderr


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def test_a_gate_fails_closed(folder, capsys):
    assert main([*LABELS, "--fail-on", "labels.insacc.median > 0.5"]) == 1
    assert main([*LABELS, "--fail-on", "leaked"]) == 1
    assert "failed on leaked: labels leaked" in capsys.readouterr().err
    assert main([*LABELS, "--fail-on", "labels.insacc.median < 0"]) == 0
    assert "--fail-on trusts 2 of 2 records as dosimeter-audit holds them" in capsys.readouterr().err
    assert main([*LABELS, "--fail-on", "inputs.psnr.median > 20", "--out", "new"]) == 2
    error = capsys.readouterr().err
    assert "nothing that ran measures inputs.psnr, so 'inputs.psnr.median > 20' cannot tell a pass from a failure" in error
    assert "trusts" not in error
    impossible = [
        "audit",
        *DIGITS,
        'labels=["ilrg"]',
        "features=[]",
        "maps=[]",
        "attacks=[]",
        "model.head_bias=false",
        "--out",
        "impossible",
    ]
    assert main([*impossible, "--fail-on", "leaked"]) == 2
    assert main([*impossible, "--fail-on", "labels.insacc.median > 0.5"]) == 2
    assert "nothing that ran measures labels.insacc (ilrg: " in capsys.readouterr().err
    assert main(impossible) == 0


def test_a_gate_on_a_crash_fails_closed(folder, monkeypatch, capsys):
    from dosimeter.labels.idlg import IDLG

    monkeypatch.setattr(IDLG, "__call__", lambda *_: 1 / 0)
    crashed = ["audit", *DIGITS, 'labels=["idlg"]', "features=[]", "maps=[]", "attacks=[]"]
    for condition in ("leaked", "labels.leaked", "labels.insacc.median > 0.9"):
        assert main([*crashed, "--fail-on", condition]) == 2, condition
        assert "crashed with ZeroDivisionError" in capsys.readouterr().err


def test_an_edited_record_stops_the_gate(folder, capsys):
    condition = ["--fail-on", "labels.insacc.median > 0.5"]
    assert main([*LABELS, *condition]) == 1
    path = Path("dosimeter-audit", FILE_NAME)
    path.write_text(path.read_text().replace('"insacc":[1.0]', '"insacc":[0.0]'))
    capsys.readouterr()
    assert main([*LABELS, *condition]) == 2
    assert "line 1: not a record (the checksum does not fit the content)" in capsys.readouterr().err
    assert main(["report", "dosimeter-audit"]) == 2


def noted(error):
    error.add_note(FAILED_MODEL)
    return error


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyError("x"), 70, "an internal error, which is a defect of Dosimeter: KeyError: 'x'; --debug shows where"),
        (TypeError("bad"), 70, "an internal error"),
        (MemoryError(), 2, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"), 2, "out of memory"),
        (noted(RuntimeError("shapes\nand kernels")), 2, "the model failed in a pass through it: shapes\n"),
        (RecursionError("maximum recursion depth exceeded"), 2, "nested too deeply"),
        (OSError(28, "No space left on device", "out/records.jsonl"), 2, "out/records.jsonl: No space left on device"),
        (ValueError("two\nlines \x1b[31m"), 2, "dosimeter: two lines [31m\n"),
        (BrokenPipeError(32, "Broken pipe"), 2, "nobody reads the output"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
    ],
)
def test_every_error_is_one_sentence_and_a_code(error, code, sentence, monkeypatch, capsys):
    def fail(folder):
        raise error

    monkeypatch.setattr("dosimeter.report.write_report", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a broken pipe replaces
    assert main(["report", "out"]) == code
    shown = capsys.readouterr().err
    assert sentence in shown
    assert shown.count("\n") == 1
    monkeypatch.setenv("DOSIMETER_DEBUG", "1")
    assert main(["report", "out"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_code_that_ends_the_program_is_no_pass(folder, capsys):
    Path("leaves.py").write_text("import sys\n\ndef build():\n    sys.exit(0)\n")
    words = ["audit", *DIGITS, "model=leaves:build", "--fail-on", "leaked", "--out", "new"]
    assert main(words) == 2
    assert "SystemExit: 0" in capsys.readouterr().err
    Path("script.py").write_text("raise SystemExit(0)\n")
    assert main(["inspect", "script:build"]) == 2


def test_help_lists_the_exit_codes(capsys):
    for words in (["--help"], ["audit", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert "70   an internal error" in capsys.readouterr().out


@pytest.mark.parametrize("name", [LOCK_NAME, FILE_NAME, "report.html", "checkpoints"])
def test_out_destroys_nothing(name, folder, capsys):
    Path("theirs").write_text("theirs")
    Path("out").mkdir()
    Path("out", name).symlink_to(folder / "theirs")
    assert main([*LABELS, "--out", "out"]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert Path("theirs").read_text() == "theirs"
    assert sorted(path.name for path in Path("out").iterdir() if path.name != LOCK_NAME) == [name] * (name != LOCK_NAME)


@pytest.mark.parametrize("name", [FILE_NAME, "report.html"])
def test_out_overwrites_no_file_of_others(name, folder, capsys):
    Path("out").mkdir()
    Path("out", name).write_text("theirs")
    assert main([*LABELS, "--out", "out"]) == 2
    assert "Dosimeter" in capsys.readouterr().err
    assert Path("out", name).read_text() == "theirs"


def test_a_run_respects_the_lock_of_an_audit(folder, capsys):
    assert main([*LABELS, "--out", "out"]) == 0
    script = "import sys\nfrom dosimeter.cli import main\nsys.exit(main(sys.argv[1:]))"
    with lock_folder("out"):
        words = ["run", "data.name=digits", "data.batch_size=3", "labels=idlg", "--out", "out"]
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert "another run is writing there" in done.stderr
    assert len(read_records("out")) == 2
    assert main([*LABELS, "--out", "out"]) == 0


def test_user_text_is_no_markup(folder, capsys):
    assert main([*LABELS, "--out", "[/x]"]) == 0
    assert "report: [/x]/report.html" in capsys.readouterr().out
    assert main([*LABELS, "--out", "[/x]/[red]"]) == 0
    assert main(["report", "[/x]"]) == 0


def test_a_log_has_plain_lines_and_json_stays_pure(folder):
    command = [sys.executable, "-m", "dosimeter", *LABELS, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | {"FORCE_COLOR": "1"})
    assert json.loads(done.stdout)["failures"] == []
    assert "\x1b" not in done.stderr
    assert [line.split(" ends after")[0] for line in done.stderr.splitlines()] == [
        "1 of 2: idlg begins",
        "idlg",
        "2 of 2: ilrg begins",
        "ilrg",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_says_one_sentence(number, folder):
    """The checkpoints are an hour apart, so that the one found was written because of the signal."""
    words = ["audit", "model=lenet5", "labels=[]", "features=[]", 'attacks=[{name = "inverting_gradients", steps = 300}]']
    words += ["attack_labels=given", "data.batch_size=1", "--checkpoint-every", "3600", "--json"]
    command = [sys.executable, "-m", "dosimeter", *words]
    whole = subprocess.run([*command, "--out", "whole"], capture_output=True, text=True, env=environment(), check=True)
    process = subprocess.Popen([*command, "--out", "stopped"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    assert any("begins" in line for line in iter(process.stderr.readline, ""))  # on a slow machine, the estimate stands before it
    time.sleep(1.5)
    process.send_signal(number)
    shown, error = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert error.splitlines()[-1] == f"dosimeter: stopped by {number.name}; what is done is saved, and the same command resumes"
    assert shown == ""
    assert list(Path("stopped/checkpoints").glob("*.safetensors"))
    again = subprocess.run([*command, "--out", "stopped"], capture_output=True, text=True, env=environment(), check=True)
    (expected,), (found,) = json.loads(whole.stdout)["records"], json.loads(again.stdout)["records"]
    assert "resumed at step" in found["details"]["message"]
    assert found["metrics"] == expected["metrics"]
