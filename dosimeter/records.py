"""Records on disk: append-only JSONL, one line an experiment, so that a killed run resumes without loss or repetition."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dosimeter.files import read_file
from dosimeter.record_schema import parse_record
from dosimeter.types import Record

FILE_NAME = "records.jsonl"
LOCK_NAME = ".lock"


def write_record(folder: str | Path, record: Record) -> None:
    """Append one line, which is on disk when this returns. A torn last line of a killed run is removed first."""
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(finite_only(dataclasses.asdict(record)), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    with path.open("r+b" if path.exists() else "w+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(_whole_length(file.read()))
        file.truncate()
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def lock_folder(folder: str | Path | None) -> Iterator[None]:
    """Lock the folder against a second run."""
    if folder is None:
        yield
        return
    path = Path(folder) / LOCK_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another run is writing there; wait for it or choose another folder") from None
        yield


def read_records(folder: str | Path) -> list[Record]:
    """The records of a run, the latest of each key. A torn last line is ignored; any other damage is an error."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no records there; `dosimeter audit --out {folder}` writes them")
    content = read_file(path)
    records: dict[str, Record] = {}
    for number, line in enumerate(content[: _whole_length(content)].splitlines(), 1):
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


def _whole_length(content: bytes) -> int:
    """The length up to the last line that is whole: it ends in a newline and is JSON."""
    length = content.rfind(b"\n") + 1
    last = content[content.rfind(b"\n", 0, max(length - 1, 0)) + 1 : length]
    try:
        if last:
            json.loads(last)
    except (ValueError, RecursionError):
        return length - len(last)
    return length


def _parse_record(line: bytes, where: str) -> Record:
    try:
        return parse_record(line)
    except ValueError as error:
        raise ValueError(f"{where}: not a record ({error}); the file was changed by hand or damaged") from None
    except TypeError as error:
        raise ValueError(f"{where}: a record of another version of Dosimeter ({error})") from None
