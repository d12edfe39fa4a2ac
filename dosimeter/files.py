"""Foreign files: only regular files are opened, and only so much is unpacked as a file of that size may hold.

A file that a stranger wrote may be a pipe that never ends, or a few bytes that unpack to a terabyte. Every reader asks here
before it allocates. Whoever trusts their files sets DOSIMETER_TRUST_DATA=1, which lifts the limits.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

TRUST_VARIABLE = "DOSIMETER_TRUST_DATA"
UNPACKED_WITHOUT_QUESTION = 2**28  # bytes that any file may unpack to
LARGEST_RATIO = 32  # of unpacked bytes to the bytes of a file; photographs and digits stay below it as float32 pixels
LARGEST_CLASS_ID = 2**17 - 1  # ImageNet-21k has 21,841 classes
LARGEST_PICTURE = 2**25  # pixels
LARGEST_TEXT = 2**20  # bytes of a configuration


def trusts_files() -> bool:
    return os.environ.get(TRUST_VARIABLE, "") not in ("", "0")


def check_unpacked(needed: int, packed: int, origin: object) -> None:
    """Refuse to unpack `needed` bytes from `packed` bytes of a file where honest data do not compress that well."""
    if needed > max(UNPACKED_WITHOUT_QUESTION, LARGEST_RATIO * packed) and not trusts_files():
        raise ValueError(f"{origin}: {packed} bytes that unpack to {readable_size(needed)} are refused; {remedy()}")


def check_class_id(largest: int, origin: object) -> None:
    if largest > LARGEST_CLASS_ID and not trusts_files():
        raise ValueError(f"{origin}: expected class ids up to {LARGEST_CLASS_ID}, got {largest}; {remedy()}")


def check_picture(width: int, height: int) -> None:
    if width * height > LARGEST_PICTURE and not trusts_files():
        raise ValueError(f"{width}×{height} pixels are more than the {LARGEST_PICTURE} allowed; {remedy()}")


def open_regular(path: str | Path) -> BinaryIO:
    """The file for reading in bytes. A pipe, a device or a folder is refused, and never waited for."""
    check_path(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"{path}: expected a file, got {kind_of(mode)}")
    return os.fdopen(descriptor, "rb")


def kind_of(mode: int) -> str:
    """What a file's mode says that it is."""
    if stat.S_ISREG(mode):
        return "a file"
    return "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"


def read_file(path: str | Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """A configuration as text in UTF-8."""
    with open_regular(path) as file:
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise ValueError(f"{path}: expected at most {LARGEST_TEXT} bytes of text")
    return content.decode("utf-8-sig")  # editors on Windows begin a file with a mark of the encoding


def size_of(path: str | Path) -> int:
    """The bytes of a file, 0 where it is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def gunzip(data: bytes, origin: object) -> bytes:
    """The content of a gzip file, unpacked no further than it may go."""
    limit = -2 if trusts_files() else max(UNPACKED_WITHOUT_QUESTION, LARGEST_RATIO * len(data))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(limit + 1)
    except EOFError:
        raise EOFError("the compressed data end too early") from None
    check_unpacked(len(content), len(data), origin)
    return content


def check_path(path: str | Path) -> None:
    """Refuse a path that no system call takes."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"expected a path, got {type(path).__name__}")
    if "\0" in str(path):
        raise ValueError(f"expected a path, got {str(path)!r}, which has a zero byte")


def readable_size(count: float) -> str:
    """Bytes in words: `3.2 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def remedy() -> str:
    """What to do about a limit that stands in the way of an honest file."""
    return f"where you trust the file, set {TRUST_VARIABLE}=1"
