"""Images and labels in a NumPy archive."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import VALIDATION, Part, own_parts, standard_part
from dosimeter.data.pixels import channels_first, scale_pixels, square
from dosimeter.data.readers.classes import class_ids, numeric_names


def read_npz(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """Arrays `images` and `labels`, or `train_images`, `train_labels`, `test_images`, ...; `class_names` where there."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = [name for name in ("train", "test", *VALIDATION) if f"{name}_images" in archive.files]
            prefixes = [f"{name}_" for name in own_parts(found, part, path)] if found else [""]
            pairs = [_pair(archive, prefix, path, size) for prefix in prefixes]
            names = _array(archive, "class_names", path).tolist() if "class_names" in archive.files else None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: expected a NumPy .npz archive, but it is damaged or truncated ({error})") from None
    if len({tuple(images.shape[1:]) for images, _ in pairs}) > 1:
        raise ValueError(f"{path}: its parts {', '.join(found)} differ in image shape; ask for one part")
    labels = torch.cat([labels for _, labels in pairs])
    images = ImageSet(
        name=path.stem,
        images=torch.cat([images for images, _ in pairs]),
        labels=labels,
        class_names=tuple(map(str, names)) if names else numeric_names(labels),
        origin=str(path),
    )
    return images if found else standard_part(images, part)


def _pair(archive: Any, prefix: str, path: Path, size: int | None) -> tuple[Tensor, Tensor]:
    where = f"{path}: {prefix}images"
    images = scale_pixels(channels_first(_array(archive, f"{prefix}images", path), where), where)
    labels = class_ids(_array(archive, f"{prefix}labels", path), len(images), f"{path}: {prefix}labels")
    return (images if size is None else square(images, size)), labels


def _array(archive: Any, name: str, path: Path) -> np.ndarray:
    if name not in archive.files:
        raise ValueError(f"{path}: expected an array {name!r}, found {', '.join(archive.files) or 'no arrays'}")
    try:
        return np.asarray(archive[name])
    except ValueError as error:
        raise ValueError(f"{path}: array {name!r} cannot be read ({error})") from None
