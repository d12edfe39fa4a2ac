"""One way in: a bundled set by name, or the user's own images by path."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dosimeter.data.dataset import ImageSet, resize, with_channels
from dosimeter.data.parts import Part, standard_part
from dosimeter.data.readers.cifar import PICKLE_MAGIC, cifar_files, read_cifar
from dosimeter.data.readers.folder import read_folder
from dosimeter.data.readers.idx import GZIP_MAGIC, idx_files, read_idx
from dosimeter.data.readers.npz import read_npz
from dosimeter.data.readers.zipped import read_zip
from dosimeter.options import OptionError, PositiveInt, check_value
from dosimeter.registry import DATASETS, options_of

ACCEPTED = "an image folder, a .zip of images, a .npz with images and labels, idx files or CIFAR python batches"


def load_images(
    source: str | Path, *, part: Part = "all", size: int | None = None, channels: int | None = None, **options: Any
) -> ImageSet:
    """A bundled set by its name (with its options), or the images at a path; a name wins over a file of the same name.

    A set without train and test parts of its own is split as `standard_part` says.
    """
    check_value(Part, part, "part")
    check_value(PositiveInt | None, size, "size")
    if isinstance(source, str) and source in DATASETS:
        if size is not None and any(option.name == "size" for option in options_of(DATASETS.entry(source))):
            options["size"] = size
        images = _fitted(DATASETS.build(source, **options), size, channels)
        return standard_part(images, part)
    if not Path(source).expanduser().exists():
        if isinstance(source, Path) or "/" in source or "\\" in source or Path(source).suffix:
            raise FileNotFoundError(f"{source}: no such file or folder; expected {ACCEPTED}, or one of: {', '.join(DATASETS)}")
        DATASETS.entry(source)
    if options:
        raise OptionError(next(iter(options)), f"goes with a bundled data set, not with the images at {source}")
    return read_images(source, part=part, size=size, channels=channels)


def read_images(path: str | Path, *, part: Part = "all", size: int | None = None, channels: int | None = None) -> ImageSet:
    """The images at `path`, whatever their layout: the content decides, not the file's name.

    Without `size` the images keep theirs (which must then be one); else the central square of each is resized. With
    `channels` 1 or 3 they become gray or RGB.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; expected {ACCEPTED}")
    return _fitted(_reader(path)(path, part=part, size=size), size, channels)


def _fitted(images: ImageSet, size: int | None, channels: int | None) -> ImageSet:
    images = images if size is None else resize(images, size)
    return images if channels is None else with_channels(images, channels)


def _reader(path: Path) -> Callable[..., ImageSet]:
    if path.is_dir():
        return read_cifar if cifar_files(path) else read_idx if idx_files(path) else read_folder
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise ValueError(f"{path}: is empty; expected {ACCEPTED}")
    if start.startswith(b"PK"):
        return read_npz if path.suffix == ".npz" or _holds_arrays(path) else read_zip
    if start.startswith((GZIP_MAGIC, b"\x00\x00")):
        return read_idx
    if start.startswith(PICKLE_MAGIC):
        return read_cifar
    raise ValueError(f"{path}: is of no known kind (it starts {start.hex(' ')}); expected {ACCEPTED}")


def _holds_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist()) and all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False
