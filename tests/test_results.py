"""The pages of docs/results are what docs/results/build.py writes from the records."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("results_build", ROOT / "docs/results/build.py")
assert SPEC is not None
assert SPEC.loader is not None
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)

FACT = """
title = "Times"
[[facts]]
title = "One"
command = "dosimeter run"
seeds = [0, 1]
"""


def written(tmp_path: Path, text: str, name: str = "times") -> str:
    (tmp_path / "records").mkdir(exist_ok=True)
    (tmp_path / "records" / f"{name}.toml").write_text(text)
    (tmp_path / "index.md").write_text("# What was measured\n")
    return build.pages(tmp_path)[tmp_path / f"{name}.md"]


def test_the_pages_are_what_the_records_give():
    pages = build.pages()
    stale = [file.name for file, text in pages.items() if not file.exists() or file.read_text() != text]
    assert stale == [], "run `make results`"
    strangers = {file.name for file in (ROOT / "docs/results").glob("*.md")} - {file.name for file in pages} - {"index.md"}
    assert strangers == set(), "a page without a record"


def test_a_fact_says_where_its_numbers_come_from(tmp_path):
    text = written(tmp_path, FACT + 'columns = ["network", "time [ms]"]\nrows = [["LeNet", 0.5], ["ResNet", 1.0]]\nfindings = ["Fast."]\n')
    assert "- command: `dosimeter run`\n- seeds: 0, 1\n- machine: not recorded\n- version: not recorded\n" in text
    assert "| network | time [ms] |\n|---|---|\n| LeNet | 0.5 |\n| ResNet | 1.0 |\n" in text
    assert text.endswith("- Fast.\n")


def test_single_numbers_have_names_and_units(tmp_path):
    text = written(tmp_path, FACT + 'values = [{ name = "longest", value = 3, unit = "ms" }]\n')
    assert "| longest | 3 ms |" in text


def test_rows_come_from_a_file_of_records(tmp_path):
    (tmp_path / "records").mkdir()
    rows = [{"row": "8: a", "psnr": 17.4491234567, "nulls": {"mean": 12.5}}, {"row": "9: b", "psnr": 3}]
    (tmp_path / "records" / "rows.json").write_text(json.dumps(rows))
    names = 'columns = { row = "row", psnr = "PSNR [dB]", "nulls.mean" = "mean" }\n'
    text = written(tmp_path, FACT + 'from = "rows.json"\nwhere = "8:"\n' + names)
    assert "| row | PSNR [dB] | mean |\n|---|---|---|\n| 8: a | 17.45 | 12.5 |" in text
    assert "9: b" not in text


def test_a_summary_of_the_reproduce_command_is_shown(tmp_path):
    cell = {"row": "r", "column": "ilrg", "quantity": "leacc", "published": 1.0, "measured": 0.9, "standard_error": None}
    law = {"says": "falls", "verdict": "reproduced", "reason": ""}
    result = {"table": "a/b", "profile": "quick", "title": "T", "source": "S", "departures": ["smaller"], "laws": [law]}
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "b.json").write_text(json.dumps(result | {"cells": [cell | {"trials": 2, "verdict": "below"}]}))
    text = written(tmp_path, FACT + 'summary = "b.json"\n')
    assert "| r | ilrg | leacc | 1.0 | 0.9 |  | 2 | below |" in text
    assert "| falls | reproduced |  |" in text
    assert "- smaller" in text


def test_a_benchmark_writes_its_fact_with_the_command_that_gave_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import measured

    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/certificates.py", "--seed", "7", "--record", "a b.json", "--only", "two words"])
    measured.write_measurement(tmp_path / "records" / "some.json", "7 to 9", ["method", "false"], [["`a`", 0]], ["0 false."])
    text = written(tmp_path, 'title = "T"\n[[facts]]\ntitle = "One"\nmeasured = "some.json"\n')
    assert "- command: `python benchmarks/certificates.py --seed 7 --only 'two words'`\n- seeds: 7 to 9\n" in text
    assert "| method | false |\n|---|---|\n| `a` | 0 |" in text
    assert text.endswith("- 0 false.\n")


def test_the_campaign_sums_its_kinds_by_method(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import certificates

    counts = dict.fromkeys(certificates.COUNTS, 0)
    kinds = {
        "labels/a: one": counts | {"draws": 2, "certified": 3, "recovered": 4, "recovered_and_certified": 3},
        "labels/a: two": counts | {"draws": 2, "certified": 1, "recovered": 4, "recovered_and_certified": 1, "false": 1},
        "features/b: one": counts | {"draws": 2},
    }
    summary = {"kinds": kinds, "notes": ["labels/a: two, seed 8: 1 false"], "skipped": {"maps: x": "needs the shared data"}}
    monkeypatch.setattr("sys.argv", ["certificates.py", "--seed", "7"])
    summary["runs"] = [certificates.run_of(summary, 7)]
    certificates.write_record(tmp_path / "word.json", summary)
    record = json.loads((tmp_path / "word.json").read_text())
    assert record["rows"][0] == ["`features/b`", 1, 2, 0, 0, 0, 0, 0, "–"]
    assert record["rows"][1] == ["`labels/a`", 2, 4, 4, 1, 0, 0, 0, "50.0%"]
    assert record["rows"][2][:5] == ["all", 3, 6, 4, 1]
    assert record["findings"] == [
        "1 false certificates in contract out of 4.",
        "1 kinds were left out: needs the shared data.",
        "labels/a: two, seed 8: 1 false.",
    ]
    assert record["seeds"] == "7 to 8, used for nothing else"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = "x"\n', "expected a title and"),
        (FACT.replace("seeds = [0, 1]\n", ""), r"facts\[0\].seeds: expected a value"),
        (FACT + 'colums = ["a"]\n', r"facts\[0\].colums: no such key"),
        (FACT + 'columns = ["a", "b"]\nrows = [["x"]]\n', "expected 2 entries, got 1"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(build.RecordError, match=message):
        written(tmp_path, text)
