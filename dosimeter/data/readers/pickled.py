"""Pickles that hold NumPy arrays, lists, numbers and text. Nothing in a pickle is ever imported or run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dosimeter.files import read_file
from dosimeter.pickles import scan_pickle

PLAIN_KINDS = "biuf"  # of arrays: booleans and numbers


def read_pickle(path: Path) -> dict[str, Any]:
    """A pickled dictionary of arrays, lists, numbers and text; whatever else it asks for is refused before it is loaded."""
    data = read_file(path)
    try:
        scan_pickle(io.BytesIO(data))
        content = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except NotAdmittedError as error:
        raise ValueError(f"{path}: not a CIFAR batch, its pickle asks for {error}, which could run code; nothing was run") from None
    except Exception as error:  # damaged bytes can fail in any way, deep inside the unpickler
        raise ValueError(f"{path}: expected a CIFAR python batch, but it is damaged or truncated ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a CIFAR python batch (a dictionary), got {type(content).__name__}")
    plain = {key: value for key, value in content.items() if isinstance(key, (str, bytes))}
    return {text_of(key): value.array if isinstance(value, _PickledArray) else value for key, value in plain.items()}


class NotAdmittedError(Exception):
    """What a pickle asks for and does not get."""


class _PickledType:
    """A NumPy number type as a pickle describes it: a code, then its byte order."""

    def __init__(self, code: Any) -> None:
        self.kind = np.dtype(text_of(code))
        if self.kind.kind not in PLAIN_KINDS:
            raise NotAdmittedError(f"an array of {self.kind}")

    def __setstate__(self, state: Any) -> None:
        if text_of(state[1]) == ">":
            self.kind = self.kind.newbyteorder(">")


class _PickledArray:
    """A NumPy array as a pickle describes it, built from its bytes alone."""

    array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        self.fill(data, kind, shape, "F" if fortran else "C")

    def fill(self, data: Any, kind: Any, shape: Any, order: str) -> _PickledArray:
        if not isinstance(kind, _PickledType) or not isinstance(data, (bytes, bytearray)):
            raise NotAdmittedError(f"an array of {type(data).__name__}")
        self.array = np.frombuffer(bytes(data), kind.kind).reshape(tuple(map(int, shape)), order="F" if text_of(order) == "F" else "C")
        return self


def _number_type(code: Any, *_: Any) -> _PickledType:
    return _PickledType(code)


def _empty_array(*_: Any) -> _PickledArray:
    return _PickledArray()


def _array_of_bytes(data: Any, kind: Any, shape: Any, order: Any = "C", *_: Any) -> _PickledArray:
    return _PickledArray().fill(data, kind, shape, order)


def _not_callable(*_: Any) -> None:
    raise NotAdmittedError("numpy.ndarray called as a function")


def _latin1(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes in protocol 2: as text to be encoded again."""
    if text_of(encoding) != "latin1":
        raise NotAdmittedError(f"the encoding {text_of(encoding)}")
    return text_of(text).encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Looks names up in a closed table; nothing is ever imported."""

    admitted: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012
        ("numpy", "ndarray"): _not_callable,
        ("numpy", "dtype"): _number_type,
        ("_codecs", "encode"): _latin1,
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty_array for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _array_of_bytes for core in ("core", "_core")},
    }

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self.admitted[module, name]
        except KeyError:
            raise NotAdmittedError(f"{module}.{name}") from None


def text_of(value: Any) -> str:
    """Text that Python 2 or 3 wrote."""
    if not isinstance(value, (str, bytes)):
        raise NotAdmittedError(f"{type(value).__name__} in place of text")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
