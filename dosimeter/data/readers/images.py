"""The user's own images by path. The content of the path decides which reader is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dosimeter.data.dataset import ImageSet, fit
from dosimeter.data.parts import Part
from dosimeter.data.readers.cifar import PICKLE_MAGIC, cifar_files, read_cifar
from dosimeter.data.readers.folder import read_folder
from dosimeter.data.readers.idx import GZIP_MAGIC, idx_files, read_idx
from dosimeter.data.readers.npz import read_npz
from dosimeter.data.readers.zipped import open_archive, read_zip
from dosimeter.files import check_path, open_regular

ACCEPTED = "an image folder, a .zip of images, a .npz with images and labels, idx files or CIFAR python batches"


def read_images(path: str | Path, *, part: Part = "all", size: int | None = None, channels: int | None = None) -> ImageSet:
    """The images at `path`, in any known layout. The content decides, not the file's name.

    With `size`, the central square of each image is resized; without it, all images must have the same size. With `channels`
    1 or 3, images become gray or RGB.
    """
    check_path(path)
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; expected {ACCEPTED}")
    return fit(_reader(path)(path, part=part, size=size), size, channels)


def _reader(path: Path) -> Callable[..., ImageSet]:
    if path.is_dir():
        return read_cifar if cifar_files(path) else read_idx if idx_files(path) else read_folder
    with open_regular(path) as file:
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
        with open_archive(path) as archive:
            return bool(archive.namelist()) and all(name.endswith(".npy") for name in archive.namelist())
    except ValueError:
        return False
