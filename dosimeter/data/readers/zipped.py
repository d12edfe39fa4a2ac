"""A zip archive of image files, read in memory: nothing is ever unpacked to disk."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import Part
from dosimeter.data.readers.pictures import read_pictures
from dosimeter.files import check_unpacked, open_regular, remedy, size_of, trusts_files

BOUNDED_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # Python unpacks the others as far as they go, whatever size is asked for
DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, NotImplementedError, ValueError, MemoryError)


def read_zip(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """Images laid out as in a folder, with an optional manifest.json."""
    with open_archive(path) as archive:
        members = [member for member in archive.infolist() if not member.filename.endswith("/")]
        for member in members:
            _check_name(member, path)
        files = {member.filename: partial(read_member, archive, member, path) for member in members}
        return read_pictures(files, path, part=part, size=size)


@contextmanager
def open_archive(path: Path, kind: str = "a zip") -> Iterator[zipfile.ZipFile]:
    """An archive that a stranger may have written; `kind` is what was expected."""
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except DAMAGE as error:
            raise ValueError(f"{path}: expected {kind} archive, but it is damaged or truncated ({error})") from None
        with archive:
            yield archive


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    """One member's bytes; one that is encrypted, damaged or packed too tightly is refused."""
    where = f"{path}: {member.filename}"
    if member.compress_type not in BOUNDED_PACKINGS and not trusts_files():
        raise ValueError(f"{where} is not packed by deflate, and may unpack a few bytes to gigabytes; pack it anew, or {remedy()}")
    check_unpacked(member.file_size, min(member.compress_size, size_of(path)), where)
    try:
        with archive.open(member) as stream:
            return stream.read(member.file_size + 1)
    except DAMAGE as error:  # encrypted and of an unknown compression among them
        raise ValueError(f"{where} cannot be read ({error})") from None


def _check_name(member: zipfile.ZipInfo, path: Path) -> None:
    name = PurePosixPath(member.filename.replace("\\", "/"))
    if not name.parts or name.is_absolute() or ".." in name.parts or ":" in name.parts[0]:
        raise ValueError(f"{path}: holds {member.filename!r}, a name that points outside the archive; it was not read")
