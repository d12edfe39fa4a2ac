"""A zip archive of image files, read in memory: nothing is ever unpacked to disk."""

from __future__ import annotations

import zipfile
import zlib
from functools import partial
from pathlib import Path, PurePosixPath

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import Part
from dosimeter.data.readers.pictures import read_pictures

LARGEST_MEMBER = 256 * 2**20  # bytes; a photograph is smaller, a decompression bomb is not


def read_zip(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """Images laid out as in a folder, with an optional manifest.json."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            for member in members:
                _check_member(member, path)
            files = {member.filename: partial(_read_member, archive, member, path) for member in members}
            return read_pictures(files, path, part=part, size=size)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: expected a zip archive, but it is damaged or truncated ({error})") from None


def _check_member(member: zipfile.ZipInfo, path: Path) -> None:
    name = PurePosixPath(member.filename.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or ":" in name.parts[0]:
        raise ValueError(f"{path}: holds {member.filename!r}, a name that points outside the archive; it was not read")
    if member.file_size > LARGEST_MEMBER:
        raise ValueError(f"{path}: {member.filename} unpacks to {member.file_size} bytes, more than the {LARGEST_MEMBER} allowed")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    try:
        return archive.read(member)
    except (zlib.error, EOFError, RuntimeError, NotImplementedError) as error:  # the last two: encrypted, unknown compression
        raise ValueError(f"{path}: {member.filename} cannot be read ({error})") from None
