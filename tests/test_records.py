import fcntl
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dosimeter.records import FILE_NAME, LOCK_NAME, lock_folder, read_records, write_record
from dosimeter.types import Record, Refused


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


def refused_elsewhere(folder, shared=False):
    """Whether another run, here one of another thread, cannot lock the folder."""

    def lock():
        with lock_folder(folder, shared=shared):
            pass

    with ThreadPoolExecutor(1) as other:
        failure = other.submit(lock).exception()
    assert failure is None or "another run is writing there" in str(failure)
    return failure is not None


def test_one_run_at_a_time(tmp_path):
    with lock_folder(tmp_path):
        assert refused_elsewhere(tmp_path)
        assert refused_elsewhere(tmp_path, shared=True)
        with lock_folder(tmp_path):  # of the same run
            assert refused_elsewhere(tmp_path)
        assert refused_elsewhere(tmp_path)
    with lock_folder(tmp_path, shared=True):
        assert not refused_elsewhere(tmp_path, shared=True)
        assert refused_elsewhere(tmp_path)
    assert not refused_elsewhere(tmp_path)


@pytest.mark.parametrize("name", [LOCK_NAME, FILE_NAME])
@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (os.mkdir, "a folder")])
def test_what_stands_in_the_place_of_a_file_is_named_before_anything_runs(name, make, kind, tmp_path):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"expected a (plain )?file, got {kind}"), lock_folder(tmp_path):
        raise AssertionError("the run began")


def test_foreign_records_and_a_file_in_the_place_of_the_checkpoints_are_refused_before_anything_runs(tmp_path):
    for name, content, said in [
        (FILE_NAME, '{"a": 1}\n', "no records file"),
        ("checkpoints", "x", "expected a folder to write to, got a file"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=said), lock_folder(tmp_path):
            raise AssertionError("the run began")
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", [LOCK_NAME, FILE_NAME, "checkpoints"])
def test_no_link_is_followed(name, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_text("theirs\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(foreign)
    with pytest.raises(ValueError, match="is a symbolic link"), lock_folder(tmp_path / "out"):
        pass
    if name == FILE_NAME:
        with pytest.raises(ValueError, match="is a symbolic link"):
            write_record(tmp_path / "out", record("a"))
    assert foreign.read_text() == "theirs\n"


def refuse_in(folder, before=lambda: None):
    with lock_folder(folder, shared=True):
        before()
        raise Refused("no")


def test_a_refusal_leaves_no_new_folder_behind_and_no_other_folder_changed(tmp_path):
    new, old, used, shared = (tmp_path / name for name in ("new", "old", "used", "shared"))
    old.mkdir()
    for folder in (new, old):
        with pytest.raises(Refused, match="no"):
            refuse_in(folder)
    assert not new.exists()
    assert old.exists()
    with pytest.raises(Refused, match="no"):
        refuse_in(used, lambda: write_record(used, record("a")))
    assert len(read_records(used)) == 1
    others = []

    def share():
        others.append(os.open(shared / LOCK_NAME, os.O_RDWR))
        fcntl.flock(others[0], fcntl.LOCK_SH)

    with pytest.raises(Refused, match="no"):
        refuse_in(shared, share)
    assert (shared / LOCK_NAME).exists()
    os.close(others[0])


def test_a_lock_file_of_another_program_is_not_cut(tmp_path):
    (tmp_path / LOCK_NAME).write_text("theirs")
    with lock_folder(tmp_path):
        write_record(tmp_path, record("a"))
    assert (tmp_path / LOCK_NAME).read_text() == "theirs"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(ValueError, match="expected a plain file"):
        write_record(tmp_path, record("a"))


FOREIGN = '{"key": "a sentence of mine that is long enough to be no key of a record'
FOREIGN_CUT = '{"key": "x", "name": "of another program", "values": [1, 2'


@pytest.mark.parametrize(
    "content",
    ["a note", "a note\n", '{"a": 1}', '{"a": 1}\n', "[1]\n", '{"key": "x"}', "1\n2", "\0", '{"key": "x"}\n', FOREIGN, FOREIGN_CUT],
)
def test_a_file_that_dosimeter_did_not_write_is_refused_and_stays_as_it_is(content, tmp_path):
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ValueError, match="no records file of Dosimeter"):
        write_record(tmp_path, record("a"))
    with pytest.raises(ValueError, match=r"no records file of Dosimeter|not a record"):
        read_records(tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == content


def test_an_edited_record_is_refused_with_its_line(tmp_path):
    for key in "abc":
        write_record(tmp_path, record(key))
    path = tmp_path / FILE_NAME
    lines = path.read_text().splitlines()
    edited = {
        "no checksum": {name: value for name, value in json.loads(lines[1]).items() if name != "checksum"},
        "the checksum does not fit": json.loads(lines[1]) | {"metrics": {"insacc": [0.0]}},
    }
    for problem, content in edited.items():
        path.write_text("\n".join([lines[0], json.dumps(content), lines[2]]) + "\n")
        with pytest.raises(ValueError, match=f"line 2: .*{problem}"):
            read_records(tmp_path)
    same = dict(reversed(json.loads(lines[1]).items()))  # other spaces and another order are the same record
    path.write_text("\n".join([lines[0], json.dumps(same, indent=None), lines[2]]) + "\n")
    assert read_records(tmp_path) == [record(key) for key in "abc"]


def test_a_character_that_utf8_lacks_does_not_stop_the_record(tmp_path):
    write_record(tmp_path, record("a", reason="\udcff ε"))
    assert read_records(tmp_path)[0].reason == "? ε"


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="no records there"):
        read_records(tmp_path)
    (tmp_path / FILE_NAME).write_text('{"key": 1}\n{"key": 2}\n')
    with pytest.raises(ValueError, match=r"line 1: not a record \(no checksum\)"):
        read_records(tmp_path)
    write_record(tmp_path / "x", record("a"))
    damaged = b"not json\n" + (tmp_path / "x" / FILE_NAME).read_bytes()
    (tmp_path / "x" / FILE_NAME).write_bytes(damaged)
    with pytest.raises(ValueError, match="line 1: not a record"):
        read_records(tmp_path / "x")
