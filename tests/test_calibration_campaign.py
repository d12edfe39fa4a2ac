"""The calibration is cut at its time limit and adds up from parts."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@pytest.fixture
def calibration(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import calibration

    yield calibration
    sys.modules.pop("calibration", None)


def run(calibration, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["calibration.py", *map(str, words)])
    calibration.main()


def test_a_campaign_that_is_cut_short_has_its_share_of_true_updates(calibration):
    begun = calibration.tasks(100, 10, 3)[:55]
    assert sum(case.update == "true" for case in begun) == 5
    assert len({case.seed for case in calibration.tasks(100, 10, 3)}) == 110


def test_no_audit_begins_after_the_time_limit(calibration, monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "carry_out", lambda *_: pytest.fail("an audit began"))
    run(calibration, monkeypatch, "--draws", 3, "--power", 1, "--seconds", -1, "--out", tmp_path / "part.json")
    assert json.loads((tmp_path / "part.json").read_text())["results"] == []


def test_parts_add_up_to_one_record(calibration, monkeypatch, tmp_path):
    def carry_out(case, *_):
        leaked = {"maps": "some: reason"} if case.update == "noise" else {}
        return calibration.Result(case, leaked=leaked)

    monkeypatch.setattr(calibration, "carry_out", carry_out)
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for seed, file in zip((10, 20), files):
        run(calibration, monkeypatch, "--draws", 30, "--power", 5, "--seed", seed, "--out", file)
    run(calibration, monkeypatch, "--merge", *files, "--record", tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    rows = {row[0]: row for row in record["rows"]}
    assert rows["empty: all"][1] == 60
    assert rows["empty: all"][2] == rows["empty: update noise"][2] == rows["empty: update noise"][1] > 0
    assert rows["true: all"][1:3] == [10, 0]
    assert record["seeds"].startswith("from 10 and from 20")
    assert [command.split("--seed ")[1] for command in record["command"]] == ["10", "20"]
