"""CIFAR's python batches, read by an unpickler that admits NumPy arrays and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import Part, own_parts, standard_part
from dosimeter.data.pixels import scale_pixels, square
from dosimeter.data.readers.classes import class_ids, numeric_names
from dosimeter.data.readers.pickled import read_pickle, text_of

PICKLE_MAGIC = b"\x80"
FILES_OF_PART = {"train": ("data_batch_*", "train"), "test": ("test_batch", "test")}  # CIFAR-10, CIFAR-100
LABEL_KEYS = ("labels", "fine_labels")
NAME_KEYS = ("label_names", "fine_label_names")


def read_cifar(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """One batch of CIFAR-10 or CIFAR-100 (fine labels), or the folder with all of them."""
    if path.is_file():
        return standard_part(_read_batches([path], path, path.parent, size), part)
    files = cifar_files(path)
    batches = [batch for name in own_parts(files, part, path) for batch in files[name]]
    return _read_batches(batches, path, path, size)


def cifar_files(folder: Path) -> dict[str, list[Path]]:
    """The batches of a folder laid out as CIFAR is, by part."""
    found = {
        name: sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        for name, patterns in FILES_OF_PART.items()
    }
    return {name: paths for name, paths in found.items() if paths}


def _read_batches(batches: list[Path], origin: Path, folder: Path, size: int | None) -> ImageSet:
    images, labels = [], []
    for path in batches:
        batch = read_pickle(path)
        data = batch.get("data")
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3072 or data.dtype != np.uint8:
            what = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else f"keys {sorted(map(str, batch))}"
            raise ValueError(f"{path}: expected a CIFAR batch with 'data' of N×3072 bytes, got {what}")
        pixels = scale_pixels(data.reshape(-1, 3, 32, 32), path)
        images.append(pixels if size is None else square(pixels, size))
        labels.append(class_ids(_array(batch, path), len(pixels), path))
    ids = torch.cat(labels)
    names = _class_names(folder) or numeric_names(ids)
    return ImageSet(name=origin.name, images=torch.cat(images), labels=ids, class_names=names, origin=str(origin))


def _array(batch: dict[str, Any], path: Path) -> np.ndarray:
    for key in LABEL_KEYS:
        labels = batch.get(key)
        if isinstance(labels, np.ndarray):
            return labels
        if isinstance(labels, list):  # flat: a nested one may stand for more numbers than fit anywhere
            if not all(type(label) is int and abs(label) < 2**63 for label in labels):
                raise ValueError(f"{path}: {key}: expected class ids as integers")
            return np.array(labels, dtype=np.int64)
    raise ValueError(f"{path}: expected a CIFAR batch with {' or '.join(map(repr, LABEL_KEYS))}, got keys {sorted(map(str, batch))}")


def _class_names(folder: Path) -> tuple[str, ...] | None:
    for path in (folder / "batches.meta", folder / "meta"):
        if path.is_file():
            meta = read_pickle(path)
            for key in NAME_KEYS:
                names = meta.get(key)
                if isinstance(names, list):
                    if not all(isinstance(name, (str, bytes)) for name in names):
                        raise ValueError(f"{path}: {key}: expected class names as text")
                    return tuple(map(text_of, names))
    return None
