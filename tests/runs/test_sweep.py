"""Sweeps: every combination once, whoever works and whoever dies; and the records hold what experiments alone give."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.config import construct, override
from dosimeter.models.loading import load_model
from dosimeter.records import cell_path, claim_cell, is_done, read_cells, write_cell
from dosimeter.report import write_report
from dosimeter.runs.audited_client import Experiment, prepare
from dosimeter.runs.experiment import run
from dosimeter.runs.sweep import Sweep, cells_of, pending, spread, was_unprepared, work
from dosimeter.runs.workers import Ray, run_sweep

CONTENT = {
    "data": ["digits"],
    "batch_sizes": [1, 2],
    "defenses": [[], [{"name": "gaussian_noise", "std": 0.01}]],
    "seeds": [0, 1],
    "labels": ["idlg", "ilrg"],
    "attacks": [{"name": "inverting_gradients", "steps": 2}],
}
FILE = """
data = ["digits"]
batch_sizes = [1, 2]
defenses = [[], [{ name = "gaussian_noise", std = 0.01 }]]
seeds = [0, 1]
labels = ["idlg", "ilrg"]
"""
SWEEP_OF_200 = """
data = ["digits"]
batch_sizes = [1, 2, 3, 4, 5]
defenses = [[], [{ name = "gaussian_noise", std = 0.01 }]]
seeds = [0, 1, 2, 3, 4]
labels = ["idlg", "ilrg"]
features = ["subspace"]
attacks = [{ name = "inverting_gradients", steps = 2 }]
"""


def values(folder):
    return {
        place: (record.key, record.metrics, record.nulls, record.verdict, record.outcome) for place, record in read_cells(folder).items()
    }


def test_every_combination_is_a_cell_and_none_is_twice():
    cells = cells_of(construct(Sweep, CONTENT))
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 2 * 2 * 3
    twice = CONTENT | {"seeds": [0, 1, 0], "batch_sizes": [1, 2, 1]}
    assert [cell.key for cell in cells_of(construct(Sweep, twice))] == [cell.key for cell in cells]
    assert {cell.experiment.data.batch_size for cell in cells} == {1, 2}
    assert {cell.experiment.labels if isinstance(cell.experiment.labels, str) else cell.experiment.labels.name for cell in cells} == {
        "given",
        "idlg",
        "ilrg",
    }


def test_a_cell_holds_what_its_experiment_gives_alone(tmp_path):
    small = CONTENT | {"batch_sizes": [2], "seeds": [1]}
    cells = cells_of(construct(Sweep, small))
    assert work(tmp_path, cells) == len(cells) == 6
    alone = construct(
        Experiment,
        {
            "data": {"name": "digits", "batch_size": 2},
            "seed": 1,
            "defenses": small["defenses"][1],
            "labels": "given",
            "attack": small["attacks"][0],
        },
    )
    cell = next(cell for cell in cells if cell.experiment == alone)
    expected = run(prepare(alone.model, alone.data, seed=1), alone.measurement())
    found = read_cells(tmp_path)[f"cells/{cell.key}.json"]
    assert (found.key, found.metrics, found.nulls) == (expected.key, expected.metrics, expected.nulls)
    assert work(tmp_path, cells) == 0
    grown = cells_of(construct(Sweep, small | {"seeds": [1, 2]}))
    assert len(pending(tmp_path, grown)) == 6
    assert dm.read(tmp_path).records


def test_a_claimed_cell_is_left_to_its_owner_and_a_death_frees_it(tmp_path):
    cells = cells_of(construct(Sweep, override(CONTENT, ["attacks=[]", "seeds=[0]", "batch_sizes=[1]", "defenses=[[]]"])))
    owner = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, cells[0].key))
    owner.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.05)
    assert work(tmp_path, cells) == len(cells) - 1
    assert [cell.key for cell in pending(tmp_path, cells)] == [cells[0].key]
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert work(tmp_path, cells) == 1
    assert pending(tmp_path, cells) == []


def _hold(folder, key):
    with claim_cell(folder, key) as mine:
        assert mine
        (folder / "held").touch()
        time.sleep(600)


def test_a_combination_that_cannot_be_is_recorded_and_a_crash_is_tried_again(tmp_path, monkeypatch):
    content = override(
        CONTENT, ["attacks=[]", "labels=['idlg']", "seeds=[0]", "batch_sizes=[1]", "defenses=[[]]", "models=['lenet5','small_cnn']"]
    )
    cells = cells_of(construct(Sweep, content))
    monkeypatch.setattr("dosimeter.runs.sweep.run", lambda *_, **__: 1 / 0)
    work(tmp_path, cells)
    refused, crashed = (read_cells(tmp_path)[f"cells/{cell.key}.json"] for cell in cells)
    assert (refused.outcome, refused.verdict) == ("not attempted", "not attempted")
    assert "expected at least 16 pixels" in refused.reason
    assert "ZeroDivisionError" in crashed.reason
    assert [is_done(tmp_path, cell.key) for cell in cells] == [True, False]
    monkeypatch.undo()
    assert work(tmp_path, cells) == 1
    assert is_done(tmp_path, cells[1].key)


def test_what_lacks_its_files_is_tried_again_and_code_is_refused_before_anything_runs(tmp_path, capsys):
    words = ["sweep", "data=['digits']", "labels=['idlg']", "batch_sizes=[1]", "models=['lenet5', 'fcn3']", "--out", str(tmp_path / "new")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "2 of 2 experiments done, 0 crashed" in said.out
    assert "1 of 2 experiments have no model or data (model.size: expected at least 16 pixels" in said.err
    keys = {Path(place).stem: record.versions for place, record in read_cells(tmp_path / "new").items()}
    assert sorted(was_unprepared(tmp_path / "new", key) for key in keys) == [False, True]
    file = tmp_path / "code.toml"
    file.write_text("models = ['nowhere:build']\nlabels = ['idlg']\n", encoding="utf-8")
    assert main(["sweep", str(file), "--out", str(tmp_path / "code")]) == 2
    assert "add --allow-code nowhere" in capsys.readouterr().err
    assert not (tmp_path / "code").exists()


def test_an_experiment_without_weights_is_made_when_they_are_there(tmp_path):
    content = override(CONTENT, ["attacks=[]", "labels=['idlg']", "seeds=[0]", "batch_sizes=[1]", "defenses=[[]]"])
    content |= {"models": [{"name": "fcn3", "weights": str(tmp_path / "weights.safetensors")}]}
    for outcome in ("not attempted", "completed"):
        run_sweep(content, tmp_path / "new", engine=in_this_process)
        assert [record.outcome for record in read_cells(tmp_path / "new").values()] == [outcome]
        save_file(load_model("fcn3", {"size": 8, "channels": 1}, None, 3).state_dict(), tmp_path / "weights.safetensors")


def in_this_process(folder, content, starts):
    work(folder, cells_of(construct(Sweep, content)))


def test_two_processes_do_each_experiment_once_and_the_page_links_to_every_record(tmp_path, capsys):
    file = tmp_path / "sweep.toml"
    file.write_text(FILE, encoding="utf-8")
    assert main(["sweep", str(file), "--out", str(tmp_path / "two"), "--workers", "2"]) == 0
    assert "16 of 16 experiments done, 0 crashed" in capsys.readouterr().out
    work(tmp_path / "one", cells_of(construct(Sweep, override(CONTENT, ["attacks=[]"]))))
    assert values(tmp_path / "two") == values(tmp_path / "one")
    page = (tmp_path / "two" / "report.html").read_text(encoding="utf-8")
    assert all(f'href="{place}"' in page for place in read_cells(tmp_path / "two"))
    assert "of 2 leaked" in page
    assert "<circle" in page


def test_a_product_without_end_is_refused_before_it_is_made():
    words = [f"seeds={list(range(4000))}", f"batch_sizes={list(range(1, 4001))}", "attacks=[]", "labels=['idlg']"]
    with pytest.raises(ValueError, match="more than the 20,000"):
        cells_of(construct(Sweep, override(CONTENT, words)))


@pytest.mark.parametrize("name", ["cells", ".claims"])
def test_a_link_in_the_folder_is_refused_before_anything_runs(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    file = tmp_path / "sweep.toml"
    file.write_text(FILE, encoding="utf-8")
    assert main(["sweep", str(file), "--out", str(tmp_path / "out")]) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []
    cell = cells_of(construct(Sweep, override(CONTENT, [])))[0]
    if name == "cells":
        with pytest.raises(ValueError, match="symbolic link"):
            write_cell(tmp_path / "out", cell.key, None)  # pyright: ignore[reportArgumentType]


def test_an_edited_record_is_refused_and_a_link_is_not_written_through(tmp_path):
    cells = cells_of(
        construct(Sweep, override(CONTENT, ["attacks=[]", "labels=['idlg']", "seeds=[0]", "batch_sizes=[1]", "defenses=[[]]"]))
    )
    work(tmp_path, cells)
    path = cell_path(tmp_path, cells[0].key)
    record = read_cells(tmp_path)[f"cells/{path.name}"]
    path.write_bytes(path.read_bytes().replace(b'"verdict":"', b'"verdict":"x'))
    with pytest.raises(ValueError, match="checksum does not fit"):
        write_report(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="symbolic link"):
        write_cell(tmp_path, cells[0].key, record)


def test_workers_begin_apart():
    assert list(spread(2, 10)) == [0, 5]
    assert list(spread(3, 10)) == [0, 3, 7]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [], "attacks": []}, "expected a method under one of"),
        ({"seeds": []}, "seeds: expected at least one"),
        ({"batch_sizes": [0]}, r"batch_sizes"),
        ({"labels": ["ilgr"]}, "did you mean 'ilrg'"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_runs(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        run_sweep(CONTENT | change, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_ray_a_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="--on ray: needs Ray, which is not installed here"):
        run_sweep(CONTENT, tmp_path, engine=Ray())


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_sweep_on_ray_survives_its_workers_and_its_driver(tmp_path):
    """200 experiments on two workers of a local Ray. A worker and then the driver are killed; the same command finishes the sweep."""
    pytest.importorskip("ray")
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP_OF_200, encoding="utf-8")
    command = [sys.executable, "-m", "dosimeter", "sweep", str(file), "--out", str(tmp_path / "ray"), "--workers", "2", "--on", "ray"]
    driver = subprocess.Popen(command)
    _wait_for(tmp_path / "ray", 30)
    worker = subprocess.run(["pgrep", "-f", "ray::work_alone"], capture_output=True, text=True, check=True).stdout.split()[0]
    os.kill(int(worker), signal.SIGKILL)
    _wait_for(tmp_path / "ray", 80)
    driver.kill()
    driver.wait()
    before = values(tmp_path / "ray")
    assert 80 <= len(before) < 200
    subprocess.run(command, check=True)
    after = values(tmp_path / "ray")
    assert len(after) == 200
    assert len({key for key, *_ in after.values()}) == 200
    assert {place: after[place] for place in before} == before
    subprocess.run([*command[:-2], "--out", str(tmp_path / "pool")], check=True)
    assert values(tmp_path / "pool") == after


def _wait_for(folder, records):
    deadline = time.monotonic() + 1500
    while len(list((folder / "cells").glob("*.json"))) < records:
        assert time.monotonic() < deadline
        time.sleep(0.1)
