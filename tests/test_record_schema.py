"""What a record may hold when it comes back from a file."""

import json

import pytest

from dosimeter.record_schema import DEEPEST_VALUE, check_plain, parse_record


def test_plain_values_pass():
    check_plain({"a": [1, 2.5, None, True, "text"], "b": {"c": []}}, "")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, 10**400]}, r"a\[1\]: expected a number up to 1e\+300"),
        ({"a": {"b": float("nan")}}, r"a\.b: expected a number up to"),
        ({"a": "\ud800"}, "half a character"),
    ],
)
def test_values_that_break_a_reader_are_refused_with_their_path(value, message):
    with pytest.raises(ValueError, match=message):
        check_plain(value, "")


def test_values_within_values_end():
    deep: list = []
    for _ in range(DEEPEST_VALUE + 1):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        check_plain(deep, "a")


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("[]", ValueError, "expected a table"),
        ('{"key": NaN}', ValueError, "expected a finite number, got NaN"),
        ('{"colour": "red"}', TypeError, "unknown field 'colour'"),
        ('{"key": "a"}', TypeError, "missing"),
        ("[" * 100_000, ValueError, "nested too deeply"),
    ],
)
def test_lines_that_are_no_record_are_refused(line, error, message):
    with pytest.raises(error, match=message):
        parse_record(line)


def record_line(**fields):
    record = dict.fromkeys(("key", "surface", "method", "verdict", "reason"), "x") | {"outcome": "completed", "seed": 0, "seconds": 1.0}
    record |= {name: {} for name in ("config", "threat_model", "metrics", "nulls", "versions")} | {"warnings": []}
    return json.dumps(record | fields)


def test_pictures_of_older_records_are_read_as_evidence():
    rows = [{"truth": "a", "recovered": None, "nulls": {"mean": "b"}, "psnr": 9.0}, {"truth": "c", "recovered": "d", "map_error": 0.1}]
    first, second = parse_record(record_line(pictures=rows)).evidence
    assert first == {"kind": "image", "private": "a", "recovered": None, "nulls": {"mean": "b"}, "score": 9.0}
    assert (second["kind"], second["private"], second["score"]) == ("tiles", "c", 0.1)


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ({"kind": "film", "recovered": "a"}, r"evidence\[0\].kind: expected one of 'image', 'tiles', 'table', 'text'"),
        ({"kind": "text"}, r"evidence\[0\]: lacks recovered"),
        ({"kind": "table", "recovered": {"a": 1}}, r"evidence\[0\].recovered"),
        ({"kind": "text", "recovered": "a", "score": "b"}, r"evidence\[0\].score"),
    ],
)
def test_evidence_of_another_kind_is_refused(shown, message):
    with pytest.raises(ValueError, match=message):
        parse_record(record_line(evidence=[shown]))
