"""What the papers contain, and how far each item is reproduced."""

import json

import pytest

from dosimeter.cli import main
from dosimeter.options import OptionError
from dosimeter.runs.reproduction import inventory, tables
from dosimeter.runs.reproduction.inventory import Item, Paper, Status, count_by_status, papers, status_of, tables_of

CELL = {"row": "r", "column": "c", "quantity": "leacc", "published": 1.0, "measured": 1.0, "verdict": "reproduced", "reason": ""}


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """The status of an item whose table gave these cells and laws."""
    monkeypatch.setattr(inventory, "RECORDED", tmp_path / "nowhere")

    def status(cells, laws=(), profile="full", departures=None, **keys):
        (tmp_path / "p").mkdir(exist_ok=True)
        result = {
            "cells": [CELL | cell for cell in cells],
            "laws": list(laws),
            "profile": profile,
            "table": "p/t",
            "row_departures": departures or {},
        }
        (tmp_path / "p" / "t.json").write_text(json.dumps(result))
        item = Item(name="Table 1", shows="labels", tables=("t",), **keys)
        (found,) = status_of(Paper(key="p", title="P", source="s", items=(item,)), tmp_path)
        return found

    return status


def test_an_item_is_done_where_every_number_and_law_agrees_or_is_exceeded(judged):
    law = {"says": "rises", "verdict": "reproduced"}
    found = judged(
        [{}, {"verdict": "above"}, {"quantity": "feature_error", "verdict": "below"}, {"published": None, "verdict": "x"}], [law]
    )
    assert (found.status, found.reproduced, found.exceeded, found.fell_short) == (Status.DONE, 2, 2, 0)
    assert found.commands == ("dosimeter reproduce p/t",)


@pytest.mark.parametrize(
    "cell",
    [
        {"verdict": "below"},
        {"quantity": "feature_error", "verdict": "above"},
        {"quantity": "count_8", "verdict": "above"},  # a count has one right value
        {"verdict": "refused"},
    ],
)
def test_one_number_that_falls_short_makes_the_item_short(judged, cell):
    found = judged([{}, cell], causes=("checked",))
    assert (found.status, found.fell_short, found.reasons) == (Status.SHORT, 1, ("checked",))


def test_a_failed_law_makes_the_item_short_and_a_skipped_row_or_a_missing_part_is_told_apart(judged):
    skipped = {"verdict": "skipped", "reason": "needs a GPU"}
    found = judged([{}, *({"row": name} | skipped for name in "abc"), {"row": "d", "verdict": "skipped", "reason": "no weights"}])
    assert (found.status, found.measured_rows, found.rows) == (Status.PARTLY, 1, 5)
    assert found.reasons == ("3 rows (a to c): needs a GPU", "d: no weights")
    assert judged([{}], missing=("CosSim",)).status is Status.PARTLY
    assert judged([{"verdict": "below"}], missing=("CosSim",)).status is Status.SHORT
    assert judged([{}], [{"says": "rises", "verdict": "not reproduced"}]).status is Status.SHORT


def test_a_quick_profile_does_not_make_an_item_done_and_a_cut_row_is_told(judged):
    assert judged([{}], profile="quick").status is Status.QUICK
    cut = {"r": ["smaller", "1 of 50 batches in the time given"], "s": ["smaller"]}
    told = ("1 row of p/t has fewer batches than the profile",)
    for profile, status in (("full", Status.PARTLY), ("quick", Status.QUICK)):
        found = judged([{}], profile=profile, departures=cut)
        assert (found.status, found.reasons) == (status, told)


def test_a_result_without_one_measured_row_is_not_yet(judged):
    assert judged([{"verdict": "skipped", "reason": "needs a GPU"}]).status is Status.NOT_YET


def test_what_was_not_measured_is_not_yet_whatever_its_causes_say(tmp_path, monkeypatch):
    monkeypatch.setattr(inventory, "RECORDED", tmp_path)
    items = (
        Item(name="Table 1", shows="labels", tables=("t",), causes=("a cause",)),
        Item(name="Figure 1", shows="a picture", illustration=True),
        Item(name="Table 2", shows="labels", impossible="no ImageNet"),
        Item(name="Table 3", shows="pictures", page="hfginv", judged="short"),
    )
    found = status_of(Paper(key="p", title="P", source="s", items=items), tmp_path)
    assert [item.status for item in found] == [Status.NOT_YET, Status.NOTHING, Status.IMPOSSIBLE, Status.SHORT]
    assert found[0].reasons == ("t: no result is recorded",)
    assert found[2].reasons == ("no ImageNet",)
    assert count_by_status(found) == {
        "done": 0,
        "agrees in the quick profile": 0,
        "agrees where measured": 0,
        "short": 1,
        "not yet": 1,
        "impossible here": 1,
        "nothing to measure": 1,
    }


def test_the_five_papers_list_every_table_file():
    known = papers()
    assert set(known) == {"ilrg", "soft-labels", "hfginv", "rgla", "thesis"}
    for paper in known.values():
        listed = {f"{paper.key}/{table}" for item in paper.items for table in item.tables}
        assert listed == set(tables_of(paper.key)), "a table that no item names"


@pytest.mark.parametrize("wrong", [{"judged": "done"}, {"page": "hfginv"}, {"page": "hfginv", "judged": "perfect"}])
def test_an_item_judged_by_hand_names_its_page(wrong):
    with pytest.raises(OptionError, match="judged: expected done or short beside a page"):
        Item(name="Table 1", shows="labels", **wrong)


def test_the_command_runs_all_tables_of_a_paper_and_tells_their_status(tmp_path, monkeypatch, capsys):
    table = """
title = "Labels of digits"
[defaults]
repeats = 1
tolerance = 0.02
model = { name = "fcn3", hidden = [20], mode = "eval" }
data = { name = "digits", size = 8, batch_size = 4 }
methods = { ilrg = { labels = "ilrg" } }
[[rows]]
name = "digits"
published.ilrg.leacc = 1.0
"""
    folder = tmp_path / "papers"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "table1.toml").write_text(table)
    (folder / "mine" / "table2.toml").write_text(table.replace('"digits", size', '"absent", size'))
    items = '[[items]]\nname = "Table 1"\nshows = "labels"\ntables = ["table1"]\n[[items]]\nname = "Table 2"\nshows = "others"\n'
    (folder / "mine.toml").write_text('title = "Mine"\nsource = "me"\n' + items)
    monkeypatch.setattr(tables, "FOLDERS", (folder,))
    monkeypatch.setattr(inventory, "FOLDERS", (folder,))
    monkeypatch.delenv("DOSIMETER_DATA", raising=False)
    out = str(tmp_path / "out")
    assert main(["reproduce", "mine", "--seed", "7", "--out", out, "--json", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "mine/table2 was left out: absent.npz" in printed.err
    (result,) = json.loads(printed.out)
    assert (result["table"], result["seed"], result["cells"][0]["trials"]) == ("mine/table1", 7, 1)
    assert main(["reproduce", "--status", "--out", out, "--json"]) == 0
    assert [item["status"] for item in json.loads(capsys.readouterr().out)["mine"]] == ["done", "not yet"]
    assert main(["reproduce", "--status", "mine", "--out", out]) == 0
    assert "2 items: 1 done, 1 not yet" in capsys.readouterr().out
    assert main(["reproduce", "--status", "other"]) == 2
    assert "expected a paper, one of mine, got 'other'" in capsys.readouterr().err


def test_another_seed_draws_other_batches(tmp_path, small):
    from dosimeter.runs.reproduction.library import Library
    from dosimeter.runs.reproduction.tables import parse_table
    from dosimeter.runs.reproduction.trials import client_of

    row, library = parse_table(small, "a/b").rows[0], Library(data=tmp_path, cache=tmp_path / "cache")
    first, second = (client_of(row, library, seed, "cpu").batch.inputs for seed in (0, 100))
    assert not first.equal(second)
