"""The dose: rounds of the same data add up, in directions above the noise, in ε, and on the report's page."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.models.loading import load_model
from dosimeter.runs.dose import directions_above_noise


def test_noise_alone_shows_no_direction(rng):
    for shape in ((10, 64), (200, 30), (64, 64)):
        assert directions_above_noise(torch.randn(shape, generator=rng, dtype=torch.float64)) == 0


def test_without_noise_every_sample_is_a_direction_at_once(classifier, batch):
    """The reference: a batch of four samples has four directions, whatever the number of rounds."""
    few = dm.Batch(batch.inputs[:4], batch.targets[:4])
    found = dm.dose([dm.observe(classifier, few) for _ in range(3)])
    assert [one.directions for one in found] == [4, 4, 4]
    assert [one.directions_so_far for one in found] == [4, 4, 4]
    assert [one.epsilon_so_far for one in found] == [None] * 3


def test_rounds_add_up_behind_noise(classifier, batch):
    """The law: behind the same noise, many rounds of the same data show more directions than one round."""
    few = dm.Batch(batch.inputs[:4], batch.targets[:4])
    second = float(torch.linalg.svdvals(dm.observe(classifier, few).update["5.weight"])[1])
    noise = (dm.defense("gaussian_noise", std=second / 2.2),)  # one round needs about 6 deviations, a hundred about 1.5
    found = dm.dose([dm.observe(classifier, few, defenses=noise, seed=seed) for seed in range(100)])
    grown = [one.directions_so_far for one in found]
    assert grown[0] == 1
    assert 2 <= grown[-1] <= 4


def test_epsilon_adds_up(classifier, batch):
    private = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=2.0),)
    found = dm.dose([dm.observe(classifier, batch, defenses=private, seed=seed) for seed in range(3)])
    spent = [one.epsilon_so_far for one in found]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1]


def test_a_withheld_head_shows_no_direction(classifier, batch):
    found = dm.dose([dm.observe(classifier, batch, defenses=("head_withheld",))])
    assert found[0].directions is None


@pytest.fixture
def captures(digits, tmp_path):
    """Two clients over three rounds of a small federation, which averages what they send."""
    images = digits[0].repeat_interleave(2, 2).repeat_interleave(2, 3)
    server = load_model("lenet5", {"classes": 10, "channels": 1, "size": 16}, None, 1)
    training = dm.FedAvg(learning_rate=0.1, steps=1)
    for number in range(3):
        states = []
        for client in (0, 1):
            chosen = slice(3 * client, 3 * client + 3)
            local = copy.deepcopy(server)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            cross_entropy(local(images[chosen]), digits[1][chosen]).backward()
            optimizer.step()
            facts = {"kind": "weights", "training": training, "batch_size": 3, "input_shape": (1, 16, 16)}
            dm.write_capture(tmp_path / "in", local.state_dict(), before=server.state_dict(), round=number, client=str(client), **facts)
            states.append(local.state_dict())
        server.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    return tmp_path / "in"


def test_a_folder_of_captures_is_a_time_line(captures, tmp_path, capsys):
    words = ["--model", "lenet5", "model.size=16", "labels=['subspace']", "features=['subspace']", "maps=[]", "attacks=[]"]
    assert main(["audit", *words, "--capture", str(captures), "--out", str(tmp_path / "out")]) == 0
    assert "labels: proved" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The dose, round after round" in page
    assert page.count("<caption>Client ") == 2
    assert main(["audit", *words, "--capture", str(captures), "--out", str(tmp_path / "out"), "--json"]) == 0  # resumes
    assert main(["audit", *words, "--capture", str(captures), "--before", "x", "--out", str(tmp_path / "out")]) == 2
    assert "a folder of captures alone" in capsys.readouterr().err
