"""MNIST's idx files, plain or gzipped."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
import torch

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import Part, own_parts, standard_part
from dosimeter.data.pixels import scale_pixels, square
from dosimeter.data.readers.classes import class_ids, numeric_names
from dosimeter.files import check_unpacked, gunzip, read_file, size_of

GZIP_MAGIC = b"\x1f\x8b"
FILES_OF_PART = {"train": "train-images", "test": "t10k-images"}


def read_idx(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """An idx file of images with its labels beside it, or a folder with MNIST's train and t10k files."""
    if path.is_file():
        return standard_part(_read_files([path], path, size), part)
    files = idx_files(path)
    return _read_files([files[name] for name in own_parts(files, part, path)], path, size)


def idx_files(folder: Path) -> dict[str, Path]:
    """The image files of a folder laid out as MNIST is, by part; the plain one where a gzipped one lies beside it."""
    found = {name: sorted(filter(Path.is_file, folder.glob(f"{start}*")), key=_is_gzipped) for name, start in FILES_OF_PART.items()}
    return {name: paths[0] for name, paths in found.items() if paths}


def _is_gzipped(path: Path) -> bool:
    return path.suffix == ".gz"


def _read_files(files: list[Path], origin: Path, size: int | None) -> ImageSet:
    images, labels = [], []
    for path in files:
        raw = _array(path, dimensions=3)
        check_unpacked(4 * raw.size, size_of(path), path)
        pixels = scale_pixels(raw[:, None], path)  # (N, 1, H, W)
        beside = _labels_beside(path)
        images.append(pixels if size is None else square(pixels, size))
        labels.append(class_ids(_array(beside, dimensions=1), len(pixels), beside))
    ids = torch.cat(labels)
    return ImageSet(name=origin.name, images=torch.cat(images), labels=ids, class_names=numeric_names(ids), origin=str(origin))


def _array(path: Path, dimensions: int) -> np.ndarray:
    """The header is two zero bytes, the type (8: unsigned bytes), the number of dimensions, then each as a big-endian uint32."""
    data = read_file(path)
    if data.startswith(GZIP_MAGIC):
        try:
            data = gunzip(data, path)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: expected a gzipped idx file, but it is damaged or truncated ({error})") from None
    if data[:4] != bytes((0, 0, 8, dimensions)):
        kind = "images (starting 00 00 08 03)" if dimensions == 3 else "labels (starting 00 00 08 01)"
        raise ValueError(f"{path}: expected an idx file of {kind}, it starts {data[:4].hex(' ') or 'with nothing: it is empty'}")
    header = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[start : start + 4], "big") for start in range(4, header, 4))
    if len(data) != header + math.prod(shape):
        expected = f"{header + math.prod(shape)} bytes for {'×'.join(map(str, shape))} values"
        raise ValueError(f"{path}: truncated or damaged, its header promises {expected}, got {len(data)}")
    if 0 in shape:
        raise ValueError(f"{path}: expected at least one value, its header promises {'×'.join(map(str, shape))}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _labels_beside(path: Path) -> Path:
    if "images" not in path.name:
        raise ValueError(f"{path}: expected 'images' in the file's name, so that its labels can be found beside it")
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    stem = name.removesuffix(".gz")
    for candidate in (path.with_name(name), path.with_name(stem), path.with_name(f"{stem}.gz")):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{path}: expected its labels beside it, as {name}")
