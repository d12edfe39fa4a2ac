"""The example notebook runs, cell by cell, and shows pictures; and what the objects print is short."""

import ast
import json
import sys
import types
from pathlib import Path

import pytest

import dosimeter as dm
from dosimeter.report import notebook
from dosimeter.types import Estimate, Outcome

NOTEBOOK = Path(__file__).parent.parent / "examples" / "audit.ipynb"
ONLY = {"labels": ["ilrg"], "features": ["subspace"], "maps": [], "attacks": [dm.attack("inverting_gradients", steps=2)]}


def run_cells(path: Path) -> list:
    """The value of the last expression of every code cell, as a notebook shows it; None where there is none."""
    shown, names = [], {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"]))
        last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, str(path), "exec"), names)
        shown.append(eval(compile(ast.Expression(last.value), str(path), "eval"), names) if last else None)
    return shown


def test_the_example_notebook_runs_and_shows_what_was_recovered(capsys):
    shown = run_cells(NOTEBOOK)
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) == 4
    assert "leaked" in pages[0]
    assert "private" in pages[0]
    assert "class 0" in pages[1]
    assert all(page.count("data:image/png;base64,iVBOR") == 4 for page in pages[2:])


def test_the_notebook_holds_no_output():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_what_is_printed_is_short(classifier, batch):
    report = dm.audit(classifier, batch, **ONLY)
    exposure = dm.observe(classifier, batch)
    labels = dm.recover_labels(exposure, "ilrg")
    found = dm.reconstruct(exposure, "inverting_gradients", labels=labels, steps=2)
    features = dm.recover_features(exposure, "subspace")
    for value in (report, report.records[0], batch, labels, found, features):
        assert len(repr(value)) < 600, repr(value)
    assert repr(report).startswith("Audit(3 records: labels ")
    assert f"inputs=tensor{tuple(batch.inputs.shape)}" in repr(found)
    assert f"labels={labels.labels.tolist()}" in repr(labels)


def test_strings_of_records_stay_text_in_a_cell(make_hostile):
    page = notebook.show_audit([make_hostile])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.fixture
def make_hostile(classifier, batch):
    import dataclasses

    (record,) = dm.audit(classifier, batch, labels=["idlg"], features=[], maps=[], attacks=[]).records
    bad = "<script>alert(1)</script>"
    return dataclasses.replace(
        record,
        method=bad,
        reason=bad,
        evidence=[{"kind": "text", "recovered": bad, "private": bad}, {"kind": "table", "recovered": {bad: bad}}],
    )


def test_an_estimate_that_holds_nothing_says_why():
    import dosimeter.runs.server  # noqa: F401 (whoever recovers anything imports it)

    refused = dm.LabelEstimate(counts=None, labels=None, outcome=Outcome.NOT_ATTEMPTED, message="no head & no hope")
    assert refused._repr_html_() == "<p>LabelEstimate: not attempted, no head &amp; no hope</p>"
    assert Estimate.show is not None


def test_records_come_back_from_their_folder(classifier, batch, tmp_path):
    report = dm.audit(classifier, batch, out=tmp_path, **ONLY)
    assert dm.read(tmp_path).records == report.records
    assert dm.read(tmp_path / "records.jsonl").verdicts == report.verdicts
    with pytest.raises(FileNotFoundError, match="no records there"):
        dm.read(tmp_path / "elsewhere")


def test_a_table_has_a_row_for_every_record(classifier, batch, monkeypatch):
    report = dm.audit(classifier, batch, **ONLY)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    rows = report.to_pandas()
    assert [row["method"] for row in rows] == ["ilrg", "subspace", "inverting_gradients"]
    assert rows[0]["insacc"] == report.records[0].metrics["insacc"][0]
    assert (rows[2]["defenses"], rows[2]["batch_size"]) == ("none", len(batch.inputs))


def test_without_pandas_a_sentence_says_so(classifier, batch, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed here"):
        dm.audit(classifier, batch, **ONLY).to_pandas()
