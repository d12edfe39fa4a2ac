"""Images and labels in a NumPy archive."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy_format
from torch import Tensor

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import VALIDATION, Part, own_parts, standard_part
from dosimeter.data.pixels import channels_first, scale_pixels, square
from dosimeter.data.readers.classes import class_ids, numeric_names
from dosimeter.data.readers.zipped import open_archive, read_member
from dosimeter.files import check_class_id, check_unpacked, size_of

SUFFIX = ".npy"
PLAIN_KINDS = "biufU"  # booleans, numbers and text; a NumPy file can also hold pickled objects


def read_npz(path: Path, *, part: Part = "all", size: int | None = None) -> ImageSet:
    """Arrays `images` and `labels`, or `train_images`, `train_labels`, `test_images`, ...; `class_names` where there."""
    with open_archive(path, "a NumPy .npz") as archive:
        members = {member.filename.removesuffix(SUFFIX): member for member in archive.infolist()}
        found = [name for name in ("train", "test", *VALIDATION) if f"{name}_images" in members]
        prefixes = [f"{name}_" for name in own_parts(found, part, path)] if found else [""]
        pixels = [members[f"{prefix}images"] for prefix in prefixes if f"{prefix}images" in members]
        check_unpacked(4 * sum(member.file_size for member in pixels), size_of(path), path)  # as float32, at a byte each
        pairs = [_pair(archive, members, prefix, path, size) for prefix in prefixes]
        named = _array(archive, members, "class_names", path) if "class_names" in members else np.empty(0)
        check_class_id(named.size - 1, f"{path}: class_names")
    if len({tuple(images.shape[1:]) for images, _ in pairs}) > 1:
        raise ValueError(f"{path}: its parts {', '.join(found)} differ in image shape; ask for one part")
    labels = torch.cat([labels for _, labels in pairs])
    images = ImageSet(
        name=path.stem,
        images=torch.cat([images for images, _ in pairs]) if len(pairs) > 1 else pairs[0][0],
        labels=labels,
        class_names=tuple(map(str, named.tolist())) if named.ndim and named.size else numeric_names(labels),
        origin=str(path),
    )
    return images if found else standard_part(images, part)


Members = dict[str, zipfile.ZipInfo]


def _pair(archive: zipfile.ZipFile, members: Members, prefix: str, path: Path, size: int | None) -> tuple[Tensor, Tensor]:
    where = f"{path}: {prefix}images"
    images = scale_pixels(channels_first(_array(archive, members, f"{prefix}images", path), where), where)
    labels = class_ids(_array(archive, members, f"{prefix}labels", path), len(images), f"{path}: {prefix}labels")
    return (images if size is None else square(images, size)), labels


def _array(archive: zipfile.ZipFile, members: Members, name: str, path: Path) -> np.ndarray:
    """One array. Its header must promise as many bytes as follow, so that nothing is allocated on the header's word."""
    if name not in members:
        raise ValueError(f"{path}: expected an array {name!r}, found {', '.join(members) or 'no arrays'}")
    data = read_member(archive, members[name], path)
    stream = io.BytesIO(data)
    try:
        version = npy_format.read_magic(stream)
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, kind = read_header(stream)
    except Exception as error:  # the header is a Python literal, and damaged ones fail in many ways
        raise ValueError(f"{path}: array {name!r} cannot be read ({error})") from None
    if kind.kind not in PLAIN_KINDS:
        raise ValueError(f"{path}: array {name!r} cannot be read (it holds {kind}: expected numbers or text)")
    start = stream.tell()
    if any(length < 0 for length in shape) or math.prod(shape) * kind.itemsize != len(data) - start:
        promised = "×".join(map(str, shape)) or "1"
        raise ValueError(
            f"{path}: array {name!r} cannot be read (its header promises {promised} of {kind}, {len(data) - start} bytes follow)"
        )
    if kind.itemsize == 0:
        return np.zeros(shape, kind)
    return np.frombuffer(data, kind, offset=start).reshape(shape, order="F" if fortran else "C")
