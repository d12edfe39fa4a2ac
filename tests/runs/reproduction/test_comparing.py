import pytest

from dosimeter.runs.reproduction.comparing import Agreement, compare_row, judge_laws
from dosimeter.runs.reproduction.tables import parse_table
from dosimeter.types import Record


def record(reason="", **metrics):
    empty = {"nulls": {}, "warnings": [], "versions": {}, "threat_model": {}, "config": {}, "seconds": 0.0, "seed": 0}
    words = {"key": "k", "surface": "labels", "method": "m", "outcome": "completed", "verdict": "leaked"}
    return Record(**empty, **words, reason=reason, metrics=metrics)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(0.9, Agreement.REPRODUCED), (0.92, Agreement.REPRODUCED), (0.921, Agreement.ABOVE), (0.879, Agreement.BELOW)],
)
def test_a_number_is_reproduced_within_its_tolerance(small, measured, verdict):
    small["rows"] = [{"name": "x", "published": {"ilrg": {"leacc": 0.9}}, "show": []}]
    (row,) = parse_table(small, "a/b").rows
    (cell,) = compare_row(row, {("x", "ilrg"): [record(leacc=[measured])]})
    assert (cell.verdict, cell.measured, cell.published) == (verdict, pytest.approx(measured), 0.9)


@pytest.mark.parametrize(("measured", "verdict"), [(9e-5, "reproduced"), (1.1e-4, "above"), (9e-7, "below")])
def test_errors_are_compared_by_their_ratio(small, measured, verdict):
    small["rows"] = [{"name": "x", "published": {"ilrg": {"label_l1": 1e-5}}, "show": []}]
    (row,) = parse_table(small, "a/b").rows
    (cell,) = compare_row(row, {("x", "ilrg"): [record(label_l1=[measured])]})
    assert cell.verdict == verdict


def test_refusals_skips_and_numbers_without_a_rival_say_so(small):
    small["rows"] = [{"name": "x", "show": ["leacc"], "published": {"ilrg": {"leacc": 1.0}}}, {"name": "y", "skip": "too long"}]
    asked, skipped = parse_table(small, "a/b").rows
    refused, shown = compare_row(asked, {("x", "ilrg"): [record(reason="no bias")], ("x", "idlg"): [record(leacc=[0.5])]})
    assert (refused.verdict, refused.measured, refused.reason) == (Agreement.REFUSED, None, "no bias")
    assert (shown.verdict, shown.measured) == (Agreement.UNPUBLISHED, 0.5)
    assert {(cell.verdict, cell.reason) for cell in compare_row(skipped, {})} == {(Agreement.SKIPPED, "too long")}


LAW = {"says": "a law", "quantity": "leacc", "column": "ilrg"}


@pytest.mark.parametrize(
    ("law", "holds"),
    [
        ({"at_least": 0.6}, True),
        ({"at_least": 0.8}, False),
        ({"at_least": 0.8, "slack": 0.2}, True),
        ({"at_least": 0.8, "rows": "b*"}, True),
        ({"at_most": 0.7}, False),
        ({"at_most": 0.8}, True),
        ({"order": "rising"}, True),
        ({"order": "falling"}, False),
        ({"order": "falling", "slack": 0.3}, True),
        ({"above": ["idlg"]}, False),
        ({"above": ["idlg"], "rows": "b"}, True),
    ],
)
def test_laws_hold_or_do_not(small, law, holds):
    small |= {"rows": [{"name": "a"}, {"name": "b"}], "laws": [LAW | law]}
    records = {("a", "ilrg"): [record(leacc=[0.6])], ("b", "ilrg"): [record(leacc=[0.8])]}
    records |= {("a", "idlg"): [record(leacc=[0.7])], ("b", "idlg"): [record(leacc=[0.7])]}
    (result,) = judge_laws(parse_table(small, "a/b"), records)
    assert result.verdict == (Agreement.REPRODUCED if holds else Agreement.NOT_REPRODUCED)
    assert bool(result.reason) is not holds
    assert set(result.numbers.values()) <= {0.6, 0.8}


def test_a_refusal_breaks_a_law_and_a_skipped_row_does_not(small):
    small |= {"rows": [{"name": "a"}, {"name": "b", "skip": "long"}], "laws": [LAW | {"at_least": 0.0}]}
    table = parse_table(small, "a/b")
    assert judge_laws(table, {("a", "ilrg"): [record(reason="no")]})[0].verdict is Agreement.NOT_REPRODUCED
    assert judge_laws(table, {("a", "ilrg"): [record(leacc=[1.0])]})[0].verdict is Agreement.REPRODUCED
