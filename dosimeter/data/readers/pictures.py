"""Image files under relative names, from a folder or a zip archive, labelled by manifest or by folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from dosimeter.data.dataset import ImageSet
from dosimeter.data.parts import VALIDATION, Part, own_parts, standard_part
from dosimeter.data.pixels import convert_channels, decode, square
from dosimeter.files import check_class_id, check_unpacked, remedy, size_of, trusts_files
from dosimeter.memory import UNKNOWN, require_memory
from dosimeter.progress import advance

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 2**24  # bytes; each may stand for many in memory
UNLABELLED = "unlabelled"  # the one class of images that lie in no folder


@dataclass(frozen=True)
class _Labelled:
    names: Sequence[str]
    labels: Sequence[int]
    class_names: tuple[str, ...]


def read_pictures(files: Mapping[str, Callable[[], bytes]], origin: Path, *, part: Part, size: int | None) -> ImageSet:
    """`files` maps each relative name to a way to read it.

    With a manifest.json (a list of {"file", "index" or "label"}) that says the classes. Else each folder is a class, in
    alphabetical order; folders train, test (or val) at the top are parts; folders around everything are looked through;
    images in no folder are one class, "unlabelled".
    """
    pictures = sorted(name for name in files if _is_picture(name))
    if not pictures:
        raise ValueError(f"{origin}: expected images ({' '.join(SUFFIXES)}), found none among its {len(files)} files")
    if MANIFEST in files:
        return standard_part(_decode_pictures(files, _by_manifest(files[MANIFEST](), pictures, origin), origin, size), part)
    folders = _folders(pictures)
    parts = {folder[0] for folder in folders if folder}
    if "train" not in parts or not parts <= {"train", "test", *VALIDATION} or () in folders:
        return standard_part(_decode_pictures(files, _by_folder(pictures, folders, origin), origin, size), part)
    labelled = _by_folder(pictures, [folder[1:] for folder in folders], origin)
    wanted = own_parts(parts, part, origin)
    keep = [position for position, folder in enumerate(folders) if folder[0] in wanted]
    chosen = _Labelled([labelled.names[k] for k in keep], [labelled.labels[k] for k in keep], labelled.class_names)
    return _decode_pictures(files, chosen, origin, size)


def _is_picture(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not any(step.startswith((".", "__MACOSX")) for step in path.parts)


def _folders(pictures: Sequence[str]) -> list[tuple[str, ...]]:
    """The folders of each picture, without those that lie around everything and hold no picture themselves."""
    folders = [PurePosixPath(name).parts[:-1] for name in pictures]
    while len({folder[:1] for folder in folders}) == 1 and all(len(folder) > 1 for folder in folders):
        folders = [folder[1:] for folder in folders]
    return folders


def _by_folder(pictures: Sequence[str], folders: Sequence[tuple[str, ...]], origin: Path) -> _Labelled:
    loose = sum(not folder for folder in folders)
    if loose == len(folders):
        return _Labelled(pictures, [0] * loose, (UNLABELLED,))
    if loose:
        raise ValueError(f"{origin}: expected one folder for each class, but {loose} images lie beside the class folders")
    class_names = sorted({folder[0] for folder in folders})
    index = {name: position for position, name in enumerate(class_names)}
    return _Labelled(pictures, [index[folder[0]] for folder in folders], tuple(class_names))


def _by_manifest(data: bytes, pictures: Sequence[str], origin: Path) -> _Labelled:
    """Class ids are the manifest's integers ("index", else "label"); texts alone are numbered in alphabetical order."""
    where = f"{origin}: {MANIFEST}"
    if len(data) > LARGEST_MANIFEST and not trusts_files():
        raise ValueError(f"{where}: expected at most {LARGEST_MANIFEST} bytes, got {len(data)}; {remedy()}")
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON ({error})") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) and isinstance(e.get("file"), str) for e in entries):
        raise ValueError(f"{where}: expected a list of objects with 'file' and 'index' or 'label'")
    bare = Counter(PurePosixPath(name).name for name in pictures)  # the manifest may leave the folder out
    by_name = {PurePosixPath(name).name: name for name in pictures if bare[PurePosixPath(name).name] == 1} | {n: n for n in pictures}
    missing = [entry["file"] for entry in entries if entry["file"] not in by_name]
    if missing:
        raise ValueError(f"{where}: names {missing[0]!r}, which is not there ({len(missing)} such of {len(entries)})")
    labels, class_names = _manifest_classes(entries, where)
    return _Labelled([by_name[entry["file"]] for entry in entries], labels, class_names)


def _manifest_classes(entries: Sequence[dict[str, Any]], where: str) -> tuple[list[int], tuple[str, ...]]:
    classes: list[Any] = [entry.get("index", entry.get("label")) for entry in entries]
    if all(isinstance(value, str) for value in classes):
        class_names = sorted(set(classes))
        index = {name: position for position, name in enumerate(class_names)}
        return [index[value] for value in classes], tuple(class_names)
    if not all(type(value) is int and value >= 0 for value in classes):
        raise ValueError(f"{where}: expected every 'index' or 'label' to be an integer of at least 0 (or every label a text)")
    check_class_id(max(classes), where)
    named = {value: entry["label"] for value, entry in zip(classes, entries) if isinstance(entry.get("label"), str)}
    return classes, tuple(named.get(value, str(value)) for value in range(max(classes) + 1))


def _decode_pictures(files: Mapping[str, Callable[[], bytes]], labelled: _Labelled, origin: Path, size: int | None) -> ImageSet:
    pictures: list[Tensor] = []
    counted: set[str] = set()  # a manifest may name a file many times
    most = size_of(origin) if origin.is_file() else UNKNOWN  # members of an archive may share their bytes
    packed = unpacked = 0
    for position, name in enumerate(labelled.names):
        data = files[name]()
        picture = decode(data, f"{origin}: {name}")  # (channels, H, W)
        pictures.append(picture if size is None else square(picture, size))
        if size is None:
            packed, unpacked = packed + (0 if name in counted else len(data)), unpacked + 4 * picture.numel()
            counted.add(name)
            check_unpacked(unpacked, min(packed, most), origin)
        elif not position:
            require_memory(2 * 4 * pictures[0].numel() * len(labelled.names), f"{origin}: {len(labelled.names)} images of {size} pixels")
        advance(position + 1, len(labelled.names), f"reading {origin.name}")
    shapes = sorted({tuple(picture.shape[1:]) for picture in pictures})
    if len(shapes) > 1:
        raise ValueError(f"{origin}: its images differ in size (such as {shapes[0]} and {shapes[-1]}); pass a size to resize them to")
    channels = max(picture.shape[0] for picture in pictures)
    return ImageSet(
        name=origin.stem,
        images=torch.stack([convert_channels(picture, channels) for picture in pictures]),
        labels=torch.tensor(labelled.labels, dtype=torch.int64),
        class_names=labelled.class_names,
        origin=str(origin),
    )
