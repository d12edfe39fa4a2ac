"""Records on disk: append-only JSONL, one line an experiment, so that a killed run resumes without loss or repetition.

Each line carries a checksum of its content, which tells a damaged or edited record from a whole one. A checksum is no signature:
whoever can write the file can write a new checksum too.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from dosimeter.artefacts import CHECKPOINT_FOLDER, atomic_write, fingerprint, open_own_file, refuse_link, require_folder
from dosimeter.files import read_file
from dosimeter.record_schema import parse_record
from dosimeter.stopping import stop_if_requested
from dosimeter.types import Outcome, Record

FILE_NAME = "records.jsonl"
LOCK_NAME = ".lock"
CELL_FOLDER = "cells"  # of a sweep: a file a record
CLAIMS_NAME = ".claims"
CHECKSUM = "checksum"  # the last key of a line

_held: ContextVar[frozenset[Path]] = ContextVar("locked folders", default=frozenset())
_LINE_BEGINS = re.compile(rb'\{"key": ?"[^"\\]*", ?"config": ?\{')  # as every line does that `write_record` began
_SHORT_LINE = re.compile(rb'\{"key": ?"[^"\\]{,40}("[^{]{,12})?')  # cut before its configuration


def write_record(folder: str | Path, record: Record) -> None:
    """Append one line, which is on disk when this returns. A torn last line of a killed run is removed first.

    A file that Dosimeter did not write, or that is a symbolic link, is refused and stays as it is. If a signal has asked the run
    to stop, the run stops here.
    """
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_own_file(path), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read()
        whole = _whole_length(content, path)
        _check_ends(content[:whole], path)
        file.seek(whole)
        if whole < len(content):
            file.truncate()
        file.write(_line_of(record))
        file.flush()
        os.fsync(file.fileno())
    stop_if_requested()


@contextmanager
def lock_folder(folder: str | Path | None, *, shared: bool = False) -> Iterator[None]:
    """Lock the folder against other runs; where the lock is `shared`, only against those that want it for themselves.

    A block inside of another one on the same folder needs no lock of its own. A folder in which something else stands in the place of
    our files is refused here, before anything is computed. A folder that was made here and that a refusal leaves empty is removed.
    """
    if folder is None or Path(folder).absolute() in _held.get():
        yield
        return
    path = Path(folder) / LOCK_NAME
    require_folder(path.parent)
    new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_place(path.parent)
    with os.fdopen(open_own_file(path), "r+b") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # the other run holds the lock, or has just removed its file
            raise ValueError(f"{folder}: another run is writing there; wait for it or choose another folder") from None
        token = _held.set(_held.get() | {Path(folder).absolute()})
        try:
            yield
        except BaseException:
            if new:
                _remove_if_empty(path, file.fileno())
            raise
        finally:
            _held.reset(token)


def _check_place(folder: Path) -> None:
    """Refuse a folder in which something stands in the place of our records or checkpoints that we did not write."""
    path, checkpoints = folder / FILE_NAME, folder / CHECKPOINT_FOLDER
    for place in (path, checkpoints):
        refuse_link(place)
    require_folder(checkpoints)
    if path.exists():
        content = read_file(path)
        _check_ends(content[: _whole_length(content, path)], path)


def _remove_if_empty(lock: Path, descriptor: int) -> None:
    """Remove a folder that holds nothing but its lock, where no other run shares it."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if [file.name for file in lock.parent.iterdir()] == [lock.name]:
            lock.unlink()
            lock.parent.rmdir()


def cell_path(folder: str | Path, key: str) -> Path:
    """Where the record of a sweep's cell lies."""
    return Path(folder) / CELL_FOLDER / f"{key}.json"


def check_cells_place(folder: str | Path) -> None:
    """Refuse a sweep's folder in which the cells or their claims are links to something else."""
    for name in (CELL_FOLDER, CLAIMS_NAME):
        refuse_link(Path(folder) / name)


def write_cell(folder: str | Path, key: str, record: Record) -> None:
    """Write the record of a sweep's cell, completely or not at all."""
    path = cell_path(folder, key)
    check_cells_place(folder)
    refuse_link(path)
    with atomic_write(path) as unfinished:
        unfinished.write_bytes(_line_of(record))
    stop_if_requested()


def is_done(folder: str | Path, key: str) -> bool:
    """Whether a sweep's cell has a record, other than that of a crash."""
    path = cell_path(folder, key)
    return path.is_file() and read_cell(path).outcome != Outcome.CRASHED


def read_cell(path: Path) -> Record:
    return _parse_record(read_file(path), str(path))


def read_cells(folder: str | Path) -> dict[str, Record]:
    """The records of a sweep, by where they lie in its folder."""
    paths = sorted((Path(folder) / CELL_FOLDER).glob("*.json"))
    return {f"{CELL_FOLDER}/{path.name}": read_cell(path) for path in paths}


@contextmanager
def claim_cell(folder: str | Path, key: str) -> Iterator[bool]:
    """Whether this process may do a cell. A claim holds one byte of a file, so that it ends with its process, whatever ends that."""
    path = Path(folder) / CLAIMS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_own_file(path), "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
        except OSError:
            yield False
            return
        yield True


def read_records(folder: str | Path) -> list[Record]:
    """The records of a run, the latest of each key. A torn last line is ignored; any other damage is an error."""
    path = Path(folder) / FILE_NAME
    if not path.is_file() and (Path(folder) / CELL_FOLDER).is_dir():
        return list(read_cells(folder).values())
    if not path.exists():
        raise FileNotFoundError(f"{path}: no records there; `dosimeter audit --out {folder}` writes them")
    content = read_file(path)
    records: dict[str, Record] = {}
    for number, line in enumerate(content[: _whole_length(content, path)].splitlines(), 1):
        record = _parse_record(line, f"{path}, line {number}")
        records[record.key] = record
    return list(records.values())


def finite_only(value: Any) -> Any:
    """JSON has no infinity and no NaN: both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_only(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_only(item) for item in value]
    return value


def _line_of(record: Record) -> bytes:
    """A record as a line of JSON. Characters that UTF-8 lacks, such as halves of surrogate pairs, become question marks."""
    text = json.dumps(finite_only(dataclasses.asdict(record)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = json.loads(text.encode(errors="replace"))
    return json.dumps({**content, CHECKSUM: _checksum(content)}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _checksum(content: dict[str, Any]) -> str:
    """A hash of the canonical JSON: keys in order, no spaces."""
    return fingerprint(json.dumps(content, sort_keys=True, separators=(",", ":")))


def _whole_length(content: bytes, path: Path) -> int:
    """The length up to the last line that is whole: it ends in a newline and is JSON. What follows must be a torn line of ours."""
    length = content.rfind(b"\n") + 1
    last = content[content.rfind(b"\n", 0, max(length - 1, 0)) + 1 : length]
    if last and _json_or_none(last) is None:
        length -= len(last)
    torn = content[length:]
    if torn and not _is_torn_record(torn):
        raise ValueError(f"{path}: is no records file of Dosimeter: its last line is neither a record nor a part of one")
    return length


def _is_torn_record(torn: bytes) -> bool:
    """Whether these bytes are the beginning of a line that `write_record` wrote. A whole one lacks its newline and has a checksum."""
    content = _json_or_none(torn)
    if content is not None:
        return isinstance(content, dict) and CHECKSUM in content
    return bool(_LINE_BEGINS.match(torn) or _SHORT_LINE.fullmatch(torn)) or b'{"key":"'.startswith(torn)


def _json_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check_ends(whole: bytes, path: Path) -> None:
    """Refuse to append to a file whose first or last line is no record of ours."""
    lines = whole.splitlines()
    for line in lines[:1] + lines[-1:]:
        content = _json_or_none(line)
        if not isinstance(content, dict) or CHECKSUM not in content:
            raise ValueError(f"{path}: is no records file of Dosimeter, so nothing is written to it; choose another folder")


def _parse_record(line: bytes, where: str) -> Record:
    try:
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("no table")
        _check_sum(content, content.pop(CHECKSUM, None))
        return parse_record(json.dumps(content))
    except RecursionError:
        raise ValueError(f"{where}: not a record (its lists or tables are nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{where}: not a record ({error}); the file was changed by hand or damaged") from None
    except TypeError as error:
        raise ValueError(f"{where}: a record of another version of Dosimeter ({error})") from None


def _check_sum(content: dict[str, Any], found: Any) -> None:
    if found is None:
        raise ValueError("no checksum")
    if found != _checksum(content):
        raise ValueError("the checksum does not fit the content")
