"""A killed command goes on where it was: kill -9 in the middle of an attack, the same command again, the same record."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dosimeter.matching.checkpoints import FOLDER
from dosimeter.records import read_records

METHOD = ["attack.name=inverting_gradients", "attack.steps=300", "model.name=lenet5", "data.batch_size=1", "labels=given"]
AUDIT = ["labels=[]", "features=[]", 'attacks=[{name = "inverting_gradients", steps = 300}]', "attack_labels=given", "data.batch_size=1"]


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "dosimeter.cli", *words, "--out", str(folder), "--checkpoint-every", "0", "--json"]


def killed_in_the_middle(words: list[str], folder: Path) -> None:
    """Start the command and kill it, without a chance to tidy up, once an attack has saved itself after 50 steps."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while all(int(load_file(file)["steps"][0]) < 50 for file in (folder / FOLDER).glob("*.safetensors")):
        assert process.poll() is None, "it was over before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["run", *METHOD], ["audit", "model.name=lenet5", *AUDIT]])
def test_a_killed_command_resumes_and_ends_as_if_it_had_not_been_killed(words: list[str], tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command(whole, *words), check=True, capture_output=True)
    killed_in_the_middle(command(broken, *words), broken)
    assert len(list((broken / FOLDER).glob("*.safetensors"))) == 1
    again = subprocess.run(command(broken, *words), check=True, capture_output=True)
    ((expected,), (found,)) = read_records(whole), read_records(broken)
    assert found.metrics == expected.metrics
    assert found.details["objective"] == expected.details["objective"]
    assert "resumed at step" in found.details["message"]
    assert "resumed" not in expected.details["message"]
    assert json.loads(again.stdout)
    assert not list((broken / FOLDER).iterdir())
