"""CIFAR's python batches, read by an unpickler that admits NumPy arrays and nothing else."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import Part, own_parts, standard_part
from dosimeter.data.pixels import scale_pixels, square
from dosimeter.data.readers.classes import class_ids, numeric_names

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
        if isinstance(batch.get(key), (list, np.ndarray)):
            return np.asarray(batch[key])
    raise ValueError(f"{path}: expected a CIFAR batch with {' or '.join(map(repr, LABEL_KEYS))}, got keys {sorted(map(str, batch))}")


def _class_names(folder: Path) -> tuple[str, ...] | None:
    for path in (folder / "batches.meta", folder / "meta"):
        if path.is_file():
            meta = read_pickle(path)
            for key in NAME_KEYS:
                if isinstance(meta.get(key), list):
                    return tuple(_text(name) for name in meta[key])
    return None


def read_pickle(path: Path) -> dict[str, Any]:
    """A pickled dictionary of arrays, lists, numbers and text; whatever else it asks for is refused before it is loaded."""
    data = io.BytesIO(path.read_bytes())
    try:
        content = _ArraysOnly(data, encoding="bytes").load()
    except _NotAdmittedError as error:
        raise ValueError(f"{path}: not a CIFAR batch, its pickle asks for {error}, which could run code; nothing was run") from None
    except Exception as error:  # damaged bytes can fail in any way, deep inside the unpickler
        raise ValueError(f"{path}: expected a CIFAR python batch, but it is damaged or truncated ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a CIFAR python batch (a dictionary), got {type(content).__name__}")
    return {_text(key): value for key, value in content.items()}


class _NotAdmittedError(Exception):
    pass


def _number_type(code: str | bytes, *_: Any) -> np.dtype:
    kind = np.dtype(_text(code))
    if kind.kind not in "biuf":
        raise _NotAdmittedError(f"an array of {kind}")
    return kind


def _latin1(text: str | bytes, encoding: str | bytes) -> bytes:
    """How Python 3 writes bytes in protocol 2: as text to be encoded again."""
    if _text(encoding) != "latin1":
        raise _NotAdmittedError(f"the encoding {_text(encoding)}")
    return _text(text).encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Looks names up in a closed table; nothing is ever imported."""

    admitted = {  # noqa: RUF012
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): _number_type,
        ("_codecs", "encode"): _latin1,
        **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0] for core in ("core", "_core")},
    }

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self.admitted[module, name]
        except KeyError:
            raise _NotAdmittedError(f"{module}.{name}") from None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
