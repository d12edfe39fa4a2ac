import json

import pytest
import torch

from dosimeter.cli import main
from dosimeter.records import read_records
from dosimeter.runs.experiment import run
from dosimeter.runs.exposures import Exposures
from dosimeter.runs.reproduction import reproduce as engine
from dosimeter.runs.reproduction.comparing import Agreement
from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.reproduce import reproduce
from dosimeter.runs.reproduction.tables import parse_table
from dosimeter.runs.reproduction.trials import client_of

TOML = """
title = "Labels of digits"
source = "a test"
published = "LeAcc"
departures = ["a test"]
[defaults]
repeats = 2
tolerance = 0.02
model = { name = "fcn3", hidden = [20], mode = "eval" }
data = { name = "digits", size = 8, batch_size = 4 }
methods = { ilrg = { labels = "ilrg" } }
[[rows]]
name = "digits"
published.ilrg.leacc = 1.0
"""


@pytest.fixture
def library(tmp_path) -> Library:
    return Library(data=tmp_path, cache=tmp_path / "cache")


def test_every_column_sees_the_same_batches_and_scores_as_it_would_alone(small, library):
    table = parse_table(small, "a/b")
    result = reproduce(table, library)
    cells = {(cell.row, cell.column, cell.quantity): cell for cell in result.cells}
    row = table.rows[0]
    for column in ("ilrg", "idlg"):
        alone = [
            run(client_of(row, library, seed, "cpu"), engine.replace(row.methods[column], seed=seed)).metrics["insacc"][0]
            for seed in range(3)
        ]
        assert cells["digits", column, "insacc"].measured == pytest.approx(sum(alone) / 3)
    assert cells["digits", "ilrg", "leacc"].verdict is Agreement.REPRODUCED
    assert cells["other, batch size 8", "ilrg", "leacc"].verdict is Agreement.ABOVE  # the table claims .5
    assert cells["digits", "idlg", "leacc"].verdict is Agreement.UNPUBLISHED
    assert result.laws[0].verdict is Agreement.REPRODUCED


def test_an_optional_row_without_its_weights_is_skipped_and_says_so(small, library):
    small["rows"].append({"name": "trained", "optional": True, "model": {"weights": "somewhere"}})
    result = reproduce(parse_table(small, "a/b"), library)
    cells = [cell for cell in result.cells if cell.row == "trained"]
    assert cells
    assert {cell.verdict for cell in cells} == {Agreement.SKIPPED}
    small["rows"][-1]["optional"] = False
    with pytest.raises(FileNotFoundError, match="somewhere"):
        reproduce(parse_table(small, "a/b"), library)


def test_a_killed_run_resumes_where_it_was(small, library, tmp_path, monkeypatch):
    table = parse_table(small, "a/b")
    whole = reproduce(table, library)
    made = []

    def dies_after_five(*arguments, **options):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(engine, "run", dies_after_five)
    with pytest.raises(KeyboardInterrupt):
        reproduce(table, library, out=tmp_path / "out")
    monkeypatch.setattr(engine, "run", lambda *a, **o: made.append(a) or run(*a, **o))
    resumed = reproduce(table, library, out=tmp_path / "out")
    assert len(made) == 3 * 3 * 2  # rows, repeats, columns: none twice
    assert [cell.measured for cell in resumed.cells] == [cell.measured for cell in whole.cells]
    monkeypatch.setattr(engine, "run", lambda *_, **__: pytest.fail("ran again"))
    again = reproduce(table, library, out=tmp_path / "out")
    assert again.cells == resumed.cells


def test_another_setting_is_not_taken_for_an_old_one(small, library, tmp_path):
    small["rows"] = small["rows"][:1]
    reproduce(parse_table(small, "a/b"), library, out=tmp_path / "out")
    small["defaults"]["data"]["batch_size"] = 9
    second = reproduce(parse_table(small, "a/b"), library, out=tmp_path / "out")
    assert len(read_records(tmp_path / "out")) == 2 * 3 * 2  # settings, repeats, columns
    assert second.cells == reproduce(parse_table(small, "a/b"), library).cells


def test_settings_of_their_own_are_exposed_apart(small, library):
    small["defaults"]["methods"]["withheld"] = {"labels": "ilrg", "defenses": ["head_withheld"]}
    cells = {(c.row, c.column): c for c in reproduce(parse_table(small, "a/b"), library).cells}
    assert cells["digits", "withheld"].verdict is Agreement.REFUSED
    assert "the client withholds it" in cells["digits", "withheld"].reason
    assert cells["digits", "ilrg"].measured is not None


def test_a_dishonest_server_sends_its_own_model(small, library):
    attack = {"name": "gradfilt", "targets": [3]}
    small["rows"] = [
        {"name": "x", "show": ["psnr"], "methods": {"gradfilt": {"attack": attack, "labels": "given"}}, "columns": ["gradfilt"]}
    ]
    row = parse_table(small, "a/b").rows[0]
    subject = client_of(row, library, 0, "cpu")
    honest = parse_table(small | {"rows": [{"name": "y"}]}, "a/b").rows[0].methods["ilrg"]
    exposing = Exposures()
    sent, other = (exposing(subject, measurement, subject.batch).model for measurement in (row.methods["gradfilt"], honest))
    rigged, kept = (next(reversed(model.state_dict().values())) for model in (sent, other))  # the last layer's bias
    assert float(rigged.max()) == 1000
    assert torch.equal(kept, next(reversed(subject.model.state_dict().values())))


def test_an_active_attack_is_scored_on_the_target_samples_it_is_after(small, library, tmp_path):
    methods = {
        "gradfilt": {"labels": "optimised", "attack": {"name": "gradfilt", "targets": [], "steps": 2}},
        "inverting": {"attack": {"name": "inverting_gradients", "steps": 2}},
        "counted": {"labels": "gradfilt"},
    }
    row = {"name": "x", "show": ["psnr_of_targets", "calibration_error"], "methods": methods, "columns": list(methods), "repeats": 1}
    row |= {"targets": {"count": 1}, "foreign": True, "reference": 5}
    table = parse_table(small | {"rows": [row], "laws": []}, "a/b")
    first = reproduce(table, library, out=tmp_path / "out")
    cells = {(cell.column, cell.quantity): cell.measured for cell in first.cells}
    assert cells["gradfilt", "psnr_of_targets"] is not None
    assert cells["inverting", "psnr_of_targets"] is not None
    assert cells["counted", "calibration_error"] == pytest.approx(0.0, abs=1e-5)
    records = {record.method: record for record in read_records(tmp_path / "out")}
    assert len(records["inverting_gradients"].metrics["psnr"]) == 4
    assert {"mean", "nearest", "foreign"} <= set(records["inverting_gradients"].nulls)
    assert records["inverting_gradients"].config["subject"]["targets"] != []
    assert reproduce(table, library, out=tmp_path / "out").cells == first.cells
    assert len(read_records(tmp_path / "out")) == 3


def test_a_decoder_is_trained_once_for_rows_that_share_model_and_auxiliary_images(small, library, tmp_path):
    methods = {"fgla": {"attack": "fgla"}}
    model = {"name": "small_cnn", "mode": "eval"}
    data = {"name": "digits", "size": 8, "batch_size": 2, "sampler": "unique", "auxiliary": {"per_class": 2}}
    rows = [{"name": name, "data": {"batch_size": size}} for name, size in (("two", 2), ("three", 3))]
    defaults = {"repeats": 1, "tolerance": 1.0, "show": ["psnr", "psnr_margin"], "model": model, "data": data, "methods": methods}
    defaults |= {"one_model": True, "decoder": {"width": 4, "epochs": 1}}
    found = reproduce(parse_table({"title": "t", "defaults": defaults, "rows": rows}, "a/b"), library, out=tmp_path / "out")
    assert all(cell.measured is not None for cell in found.cells)
    (file,) = (library.cache / "decoders").glob("*.safetensors")
    assert {record.config["attack"]["decoder"] for record in read_records(tmp_path / "out")} == {str(file)}


def test_two_rows_of_one_name_are_refused(small, library):
    small["rows"] = [{"name": "x"}, {"name": "x"}]
    with pytest.raises(ValueError, match="two rows are called 'x'"):
        reproduce(parse_table(small, "a/b"), library)


def test_what_is_missing_is_said_before_anything_runs(small, library, tmp_path):
    small["rows"].append({"name": "last", "data": {"name": "imagenet"}})
    with pytest.raises(FileNotFoundError, match=r"imagenet.npz"):
        reproduce(parse_table(small, "a/b"), library, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_published_measured_and_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "mine.toml").write_text(TOML)
    words = ["reproduce", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (cell,) = result["cells"]
    assert (cell["published"], cell["measured"], cell["verdict"], cell["trials"]) == (1.0, 1.0, "reproduced", 2)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "reproduced" in shown
    assert "departure: a test" in shown


def test_the_command_lists_tables_and_names_missing_files(tmp_path, capsys):
    assert main(["reproduce", "--json"]) == 0
    assert "ilrg/table1" in {entry["table"] for entry in json.loads(capsys.readouterr().out)}
    assert main(["reproduce"]) == 0
    assert "ilrg/table1" in capsys.readouterr().out
    assert main(["reproduce", "ilrg/table1", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "cifar100.npz: this table needs it" in capsys.readouterr().err
