"""A killed command goes on where it was: kill -9 in the middle of an attack, the same command again, the same record."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dosimeter as dm
from dosimeter.artefacts import CHECKPOINT_FOLDER, save_checkpoints
from dosimeter.engines.matching.state import State, fits, to_tensors
from dosimeter.progress import listening
from dosimeter.records import read_records

METHOD = ["attack.name=inverting_gradients", "attack.steps=300", "model.name=lenet5", "data.batch_size=1", "labels=given"]
AUDIT = ["labels=[]", "features=[]", 'attacks=[{name = "inverting_gradients", steps = 300}]', "attack_labels=given", "data.batch_size=1"]


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "dosimeter.cli", *words, "--out", str(folder), "--checkpoint-every", "0", "--json"]


def killed_in_the_middle(words: list[str], folder: Path) -> None:
    """Start the command and kill it, without a chance to tidy up, once an attack has saved itself after 50 steps."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while all(int(load_file(file)["steps"][0]) < 50 for file in (folder / CHECKPOINT_FOLDER).glob("*.safetensors")):
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
    assert len(list((broken / CHECKPOINT_FOLDER).glob("*.safetensors"))) == 1
    again = subprocess.run(command(broken, *words), check=True, capture_output=True)
    ((expected,), (found,)) = read_records(whole), read_records(broken)
    assert found.metrics == expected.metrics
    assert found.details["objective"] == expected.details["objective"]
    assert "resumed at step" in found.details["message"]
    assert "resumed" not in expected.details["message"]
    assert json.loads(again.stdout)
    assert not list((broken / CHECKPOINT_FOLDER).iterdir())


def test_a_checkpoint_has_the_same_name_in_every_process() -> None:
    """The stem and first block are a set of names, whose order is another in every process."""
    told = """
import torch, dosimeter as dm
from dosimeter.attacks import stepwise
from dosimeter.artefacts import save_checkpoints
from dosimeter.engines.matching.checkpoints import Checkpoint
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.state import begin
from dosimeter.registry import MODELS
torch.manual_seed(0)
batch = dm.Batch(torch.rand(1, 3, 32, 32), torch.tensor([3]))
def told(exposure, labels, rng, recipe):
    problem = make_problem(exposure, labels, recipe)
    print(Checkpoint(exposure, recipe, begin(problem, rng).variables, problem.guess.targets).file.path)
stepwise.solve = told
with save_checkpoints("folder"):
    dm.reconstruct(dm.observe(MODELS.build("resnet20").eval(), batch), "stepwise", labels=batch.targets)
"""
    names = {
        subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in "123"
    }
    assert len(names) == 1


@pytest.mark.parametrize(("change", "begun"), [(1e-6, 20), (0.3, 0)])
def test_an_update_computed_again_resumes_and_another_one_does_not(change: float, begun: int, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 5)).eval()
        batch = dm.Batch(torch.rand(1, 1, 4, 4), torch.tensor([3]))
        exposure = dm.observe(model, batch)
        update = {
            name: sent + change * sent.norm() / sent.numel() ** 0.5 * torch.randn_like(sent) for name, sent in exposure.update.items()
        }
    again = dm.Exposure(model=exposure.model, update=update, public=exposure.public)

    def kill(done: int, total: int, note: str) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    settings = {"labels": batch.targets, "steps": 50}
    with save_checkpoints(tmp_path, every=0), pytest.raises(KeyboardInterrupt), listening(kill):
        dm.reconstruct(exposure, "inverting_gradients", **settings)
    first: list[int] = []
    with save_checkpoints(tmp_path, every=1e9), listening(lambda done, total, note: first.append(done)):
        dm.reconstruct(again, "inverting_gradients", **settings)
    assert first[0] == begun


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("variables", torch.zeros(0, 3)),
        ("best", torch.zeros(1, 1, 3)),
        ("steps", torch.tensor([-1, 0])),
        ("steps", torch.zeros(0, dtype=torch.int64)),
        ("optimiser count", torch.tensor(-1)),
        ("own numbers", torch.zeros(5056, dtype=torch.uint8)),
        ("optimiser mean", None),
    ],
)
def test_only_what_can_be_a_state_of_this_run_is_taken_up(name, value):
    rng = torch.Generator().manual_seed(0)
    state = State(variables=torch.zeros(2, 3), best=torch.zeros(2, 3), best_objective=torch.zeros(2), alive=torch.ones(2, dtype=torch.bool))
    state.memory = {"mean": torch.zeros(2, 3), "count": torch.tensor(0)}
    saved = to_tensors(state, rng)
    assert fits(state, rng, saved)
    one = {
        key: tensor[:1] if key in ("variables", "best", "best objective", "alive", "optimiser mean") else tensor
        for key, tensor in saved.items()
    }
    assert fits(state, rng, one | {"ended": torch.tensor([0.5], dtype=torch.float64)})
    changed = {key: tensor for key, tensor in (saved | {name: value}).items() if tensor is not None}
    assert not fits(state, rng, changed)
