import math

import pytest

from dosimeter.records import FILE_NAME, lock_folder, read_records, write_record
from dosimeter.types import Record


def record(key: str, **changes) -> Record:
    values = {
        "config": {"seed": 0},
        "surface": "labels",
        "method": "idlg",
        "seed": 0,
        "threat_model": {},
        "metrics": {"insacc": [0.5]},
        "nulls": {},
        "outcome": "completed",
        "verdict": "leaked",
        "reason": "",
        "warnings": [],
        "seconds": 0.1,
        "versions": {},
    }
    return Record(**{"key": key, **values, **changes})


def test_records_come_back_whole(tmp_path):
    for key in "abc":
        write_record(tmp_path / "run", record(key))
    assert read_records(tmp_path / "run") == [record(key) for key in "abc"]


def test_a_torn_last_line_is_passed_over_and_then_redone(tmp_path):
    write_record(tmp_path, record("a"))
    write_record(tmp_path, record("b"))
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert [r.key for r in read_records(tmp_path)] == ["a"], cut
    write_record(tmp_path, record("b"))
    assert path.read_bytes() == whole


def test_a_torn_line_that_ends_in_a_newline_is_torn_too(tmp_path):
    write_record(tmp_path, record("a"))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"key": "b", "conf\n')
    assert [r.key for r in read_records(tmp_path)] == ["a"]


def test_the_latest_of_a_key_counts(tmp_path):
    write_record(tmp_path, record("a", seconds=1.0))
    write_record(tmp_path, record("a", seconds=2.0))
    assert [r.seconds for r in read_records(tmp_path)] == [2.0]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    write_record(tmp_path, record("a", metrics={"psnr": [1.0, math.nan, math.inf]}))
    assert read_records(tmp_path)[0].metrics == {"psnr": [1.0, None, None]}


def test_one_run_at_a_time(tmp_path):
    with lock_folder(tmp_path), pytest.raises(ValueError, match="another run is writing there"), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        write_record(tmp_path, record("a"))


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="no records there"):
        read_records(tmp_path)
    (tmp_path / FILE_NAME).write_text('{"key": "1"}\n{"key": "2"}\n')
    with pytest.raises(ValueError, match="line 1: a record of another version"):
        read_records(tmp_path)
    write_record(tmp_path / "x", record("a"))
    damaged = b"not json\n" + (tmp_path / "x" / FILE_NAME).read_bytes()
    (tmp_path / "x" / FILE_NAME).write_bytes(damaged)
    with pytest.raises(ValueError, match="line 1: not a record"):
        read_records(tmp_path / "x")
