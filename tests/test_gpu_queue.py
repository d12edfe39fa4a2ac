"""The queue of the papers' tables: what is left, what it costs, and a result that a plain run gives too."""

import json
from pathlib import Path

import pytest

from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.reproduce import reproduce
from dosimeter.runs.reproduction.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
TABLE = """
title = "Labels of digits"
[defaults]
repeats = 2
tolerance = 0.02
model = { name = "fcn3", hidden = [20], mode = "eval" }
data = { name = "digits", size = 8, batch_size = 4 }
methods = { ilrg = { labels = "ilrg" }, idlg = { labels = "idlg" } }
[[rows]]
name = "one"
published.ilrg.leacc = 1.0
[[rows]]
name = "two"
data = { batch_size = 8 }
published.ilrg.leacc = 1.0
"""


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_queue

    return gpu_queue


@pytest.fixture
def table(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "digits.toml").write_text(TABLE)
    return read_table(str(folder / "digits.toml"))


def test_first_batches_come_first_and_every_record_is_one_job(queue, table):
    jobs = queue.jobs_of(table)
    assert [(job.repeat, job.row, job.column) for job in jobs[:5]] == [
        (0, 0, "ilrg"),
        (0, 0, "idlg"),
        (0, 1, "ilrg"),
        (0, 1, "idlg"),
        (1, 0, "ilrg"),
    ]
    assert len(jobs) == 8


def test_the_jobs_give_what_one_run_gives_and_a_cut_says_how_far_it_came(queue, table, tmp_path):
    library, out = Library(data=tmp_path, cache=tmp_path / "cache"), tmp_path / "out"
    jobs = queue.jobs_of(table)
    assert queue.forecast(jobs, out) == (0, 8)
    queue.work(jobs[:6], {table.key: table}, library, out, "cpu")  # the second row's second batch is cut
    seconds, unknown = queue.forecast(jobs, out)
    assert unknown == 0
    assert seconds == pytest.approx(sum(jobs[n].seconds(out) for n in (2, 3)))
    queue.collect(table, jobs, library, out, "cpu")
    cut = json.loads((out / f"{table.key}.json").read_text())
    assert [cell["trials"] for cell in cut["cells"]] == [2, 1]
    assert cut["row_departures"]["two"] == ["1 of 2 batches in the time given"]
    queue.work(jobs, {table.key: table}, library, out, "cpu")
    queue.collect(table, jobs, library, out, "cpu")
    whole = json.loads((out / f"{table.key}.json").read_text())
    assert whole["cells"] == [vars(cell) for cell in reproduce(table, library).cells]


def test_workers_do_the_jobs_and_the_plan_names_what_is_left(queue, table, tmp_path, capfd):
    words = [str(tmp_path / "mine" / "digits.toml"), "--out", str(tmp_path / "out"), "--device", "cpu", "--workers", "1"]
    assert queue.main([*words, "--plan"]) == 0
    assert "mine/digits: 8 of 8 jobs left, about 0 s on 1 workers, and 8 of unknown cost" in capfd.readouterr().out
    assert not (tmp_path / "out").exists()
    assert queue.main([*words, "--rows", "one", "--batches", "1", "--seconds", "200"]) == 0
    assert "mine/digits: 0 of 2 jobs left" in capfd.readouterr().out
    result = json.loads((tmp_path / "out" / "mine" / "digits.json").read_text())
    assert [cell["verdict"] for cell in result["cells"]] == ["reproduced", "skipped"]


def test_a_row_without_its_weights_is_left_out_and_a_job_measures_what_the_table_asks(queue, tmp_path, monkeypatch):
    """A quantity of a law counts as asked, although a job is one column of one row."""
    weightless = '[[rows]]\nname = "three"\noptional = true\nmodel = { name = "fcn3", weights = "nobody_has_these" }\n'
    law = '[[laws]]\nsays = "near"\nquantity = "calibration_error"\ncolumn = "ilrg"\nat_most = 1.0\n'
    (tmp_path / "digits.toml").write_text(TABLE + weightless + law)
    table = str(tmp_path / "digits.toml")
    seen = []
    monkeypatch.setattr(queue, "reproduce", lambda part, *_, **__: seen.append(queue.asked_quantities(part)))
    options = queue._parse([table, "--out", str(tmp_path / "out")])
    library = Library(data=tmp_path, cache=tmp_path / "cache")
    read = queue._table(table, options, library)
    assert "nobody_has_these" in read.rows[2].skip
    jobs = queue.jobs_of(read)
    assert {job.row for job in jobs} == {0, 1}
    queue.run_job(jobs[1], read, library, tmp_path / "out", "cpu")
    assert seen == [{"leacc", "calibration_error"}]
