"""Captures on disk: one safetensors file each, whole or not at all, under a name of its own; and the models that were sent."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dosimeter.artefacts import read_tensors, refuse_link, write_tensors
from dosimeter.captures.capture import Capture, Facts, hash_of, read_facts, write_facts
from dosimeter.client.checks import check_tensor
from dosimeter.client.sent_tensors import as_tensor
from dosimeter.files import check_path, open_regular, trusts_files
from dosimeter.memory import require_memory
from dosimeter.options import first_line

KEY = "dosimeter_capture"  # of the facts in the file's metadata
SUFFIX = ".safetensors"
LARGEST_HEADER = 2**24  # bytes
MOST_TENSORS = 2**16
HASH_IN_NAME = 16  # digits
TYPES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # bytes of an entry
Tensors = Mapping[str, Tensor | np.ndarray]


def write_capture(folder: str | Path, update: Tensors, *, before: Tensors | str | None = None, **facts: Any) -> Path:
    """Write what a client sent, and the model `before` that it was sent, or its hash. The file is on disk when this returns.

    `facts` are those of `Capture`: kind, round, client, training, batch_size and so on. Each capture has a file of its own. A model is
    written once, however many clients got it. A kill loses no capture that was written, and leaves no half of one.
    """
    folder = Path(folder)
    tensors = _as_tensors(update, "update")
    if before is not None:
        facts["before"] = before if isinstance(before, str) else write_model(folder, before)
    capture = Capture(update=tensors, **facts)
    path = (
        folder / f"round-{'x' if capture.round is None else capture.round}-client-{_plain(capture.client)}-{secrets.token_hex(6)}{SUFFIX}"
    )
    write_tensors(path, tensors, {KEY: write_facts(capture)}, durable=True)
    return path


def read_capture(path: str | Path) -> Capture:
    """The capture in a file. A file that is damaged, foreign or of a newer format is a ValueError; nothing in it is run."""
    check_path(path)
    path = Path(path)
    text = check_header(path).get(KEY)
    if text is None:
        raise ValueError(f"{path}: is a safetensors file without the facts of a capture; `dm.write_capture` writes them")
    try:
        facts = read_facts(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    update, _ = read_tensors(path)
    if not update:
        raise ValueError(f"{path}: holds no tensor")
    return Capture(update=update, **{each.name: getattr(facts, each.name) for each in fields(Facts)})


def read_model(path: str | Path, capture: Capture) -> dict[str, Tensor] | None:
    """The model that was sent, where it lies beside the capture's file; None where it does not."""
    beside = Path(path).parent / _model_name(capture.before)
    if not capture.before or not beside.is_file():
        return None
    check_header(beside)
    state, _ = read_tensors(beside)
    if hash_of(state) != capture.before:
        raise ValueError(f"{beside}: is not the model that {Path(path).name} was captured with; its content was changed")
    return state


def captures_in(folder: str | Path) -> list[Path]:
    """The captures of a folder by round, client and name."""
    found = [path for path in Path(folder).glob(f"round-*-client-*{SUFFIX}") if path.is_file()]
    return sorted(found, key=lambda path: [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", path.name))])


def check_header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, whose header promises no more than the file holds."""
    check_path(path)
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or (length > LARGEST_HEADER and not trusts_files()):
                raise ValueError("its header is cut or too long")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file: {first_line(error)}") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()) or len(header) > MOST_TENSORS:
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file")
    require_memory(2 * sum(_bytes_of(entry, name, path) for name, entry in header.items()), f"{path}: reading it")
    if sum(_bytes_of(entry, name, path) for name, entry in header.items()) != size - 8 - length:
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file: its tensors do not add up to its size")
    return metadata


def _bytes_of(entry: Any, name: str, path: Path) -> int:
    kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file: {name!r} has no shape")
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"{path}: {name!r}: expected a type out of {', '.join(TYPES)}, got {kind!r}")
    size = TYPES[kind]
    for side in shape:
        size = min(size * side, 2**63)
    return size


def write_model(folder: str | Path, state: Tensors) -> str:
    """Write a model that was sent to clients, unless the folder has it. Returns its hash, for a capture's `before`."""
    folder, state = Path(folder), _as_tensors(state, "before")
    name = hash_of(state)
    path = folder / _model_name(name)
    refuse_link(path)
    if not path.exists():
        write_tensors(path, state, durable=True)
    return name


def _as_tensors(state: Tensors, name: str) -> dict[str, Tensor]:
    if not isinstance(state, Mapping):
        raise TypeError(f"{name}: expected tensors by name, as a state dict has them, got {type(state).__name__}")
    # A copy of its own on the CPU for each: tensors that share memory cannot be written.
    tensors = {str(key): as_tensor(value, f"{name}.{key}").cpu().contiguous().clone() for key, value in state.items()}
    for key, tensor in tensors.items():
        check_tensor(tensor, f"{name}.{key}")  # what `read_capture` would refuse
    return tensors


def _model_name(before: str) -> str:
    return f"model-{before[:HASH_IN_NAME]}{SUFFIX}"


def _plain(client: str) -> str:
    """A client's name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", client)[:40] or "x"
