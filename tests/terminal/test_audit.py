"""What an audit prints: the verdict of each surface, the methods beneath it, and where the report lies."""

from pathlib import Path

import pytest

from dosimeter.runs.audit import Audit
from dosimeter.terminal.audit import print_audit
from dosimeter.types import Record


def record(surface: str, method: str, verdict: str, **fields) -> Record:
    defaults = {"metrics": {}, "nulls": {}, "outcome": "completed", "reason": f"because of {method}", "warnings": [], "seconds": 1.25}
    identity = {"key": method, "config": {}, "seed": 0, "threat_model": {"defenses": []}, "versions": {}}
    return Record(surface=surface, method=method, verdict=verdict, **(identity | defaults | fields))


@pytest.fixture
def result() -> Audit:
    weak = {"metrics": {"psnr": [10.0, 12.0, 14.0]}, "nulls": {"mean": {"psnr": [9.0] * 3}, "nearest": {"psnr": [11.5] * 3}}}
    strong = {"metrics": {"psnr": [31.0, 32.0, 33.0]}, "nulls": weak["nulls"]}
    return Audit(
        records=(
            record("inputs", "dlg", "not shown at this budget", **weak),
            record("inputs", "inverting_gradients", "leaked", **strong),
            record("inputs", "linear_recursion", "not attempted", outcome="not attempted"),
            record("features", "subspace", "not measured", outcome="crashed"),
        )
    )


def printed(result: Audit, capsys, monkeypatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "160")
    print_audit(result, Path("somewhere/report.html"))
    return capsys.readouterr().out.splitlines()


def test_the_gravest_verdict_leads_and_the_methods_follow_in_its_order(result, capsys, monkeypatch):
    lines = printed(result, capsys, monkeypatch)
    assert lines[0].startswith("inputs: leaked (inverting_gradients): because of inverting_gradients")
    rows = [line.split() for line in lines[1:] if line.split() and line.split()[0] in ("dlg", "inverting_gradients", "linear_recursion")]
    assert [row[0] for row in rows] == ["inverting_gradients", "dlg", "linear_recursion"]
    assert rows[0][1:5] == ["32", "11.5", "1.2", "leaked"]
    assert rows[1][1:3] == ["12", "11.5"]
    assert rows[2][1:5] == ["1.2", "not", "attempted:", "because"]


def test_a_null_that_could_not_be_made_is_printed_beside_its_method(result, capsys, monkeypatch):
    refused = record("inputs", "dlg", "not shown at this budget", metrics={"psnr": [30.0]}, nulls={"mean": {"psnr": [9.0]}})
    refused.details["refused_nulls"] = {"foreign": "refused"}
    lines = printed(Audit(records=(refused,)), capsys, monkeypatch)
    assert any(
        line.endswith("not shown at this budget: because of dlg; without the null 'foreign': refused") for line in map(str.strip, lines)
    )


def test_what_was_not_attempted_is_not_printed_as_reassuring(capsys, monkeypatch):
    refused = Audit(records=(record("labels", "ilrg", "not attempted", outcome="not attempted"),))
    assert printed(refused, capsys, monkeypatch)[0] == "labels: not attempted, which says nothing about safety (ilrg): because of ilrg"


def test_a_surface_without_a_verdict_is_said_to_be_not_measured_and_the_report_comes_last(result, capsys, monkeypatch):
    lines = printed(result, capsys, monkeypatch)
    assert any(line.startswith("features: not measured (subspace)") for line in lines)
    assert lines[-1] == "report: somewhere/report.html"


def test_the_premises_of_the_proof_follow_its_verdict(result, capsys, monkeypatch):
    proved = record("labels", "subspace", "leaked", details={"certified": True, "premises": ["no defense changed the update"]})
    needy = {"certified": True, "premises": ["no defense changed the update", "every sample has one label"]}
    also = record("labels", "cv_matching", "leaked", reason=proved.reason, details=needy)
    lines = printed(Audit(records=(*result.records, also, proved)), capsys, monkeypatch)
    (place,) = [number for number, line in enumerate(lines) if line.startswith("labels: leaked")]
    assert lines[place + 1] == "what is proved takes for granted: no defense changed the update (subspace)"
    assert sum("takes for granted" in line for line in lines) == 1, "of several proofs, the one that takes least for granted"


def test_a_score_that_shows_no_leak_stands_beside_its_reason(capsys, monkeypatch):
    lucky = record("labels", "ilrg", "not shown at this budget", metrics={"insacc": [1.0]}, nulls={"prior": {"insacc": [0.7]}})
    lines = printed(Audit(records=(lucky,)), capsys, monkeypatch)
    assert any(
        line.split()[:2] == ["ilrg", "1"] and line.endswith("not shown at this budget: because of ilrg") for line in map(str.strip, lines)
    )
