"""A folder of image files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import Part
from dosimeter.data.readers.pictures import read_pictures
from dosimeter.files import read_file


def read_folder(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """One sub-folder a class, or a flat folder of unlabelled images, or images with a manifest.json."""
    files = {file.relative_to(path).as_posix(): partial(read_file, file) for file in path.rglob("*") if file.is_file()}
    if not files:
        raise ValueError(f"{path}: expected a folder of images, found an empty folder")
    return read_pictures(files, path, part=part, size=size)
