"""Disjoint private, auxiliary and foreign parts, and the check that they are disjoint in fact."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from dosimeter.data.dataset import ImageSet, select, stratified


def partition(images: ImageSet, sizes: Mapping[str, int | float], rng: Generator) -> dict[str, ImageSet]:
    """Disjoint stratified parts by name: an int is a number of images, a float a fraction of the set (rounded down).

    The parts are cut one after the other, so that adding a part at the end does not move those before it.
    """
    counts = {name: _count(name, size, len(images)) for name, size in sizes.items()}
    if sum(counts.values()) > len(images):
        asked = " + ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"partition: {asked} = {sum(counts.values())} images, but {images.name} has {len(images)}")
    remaining = torch.arange(len(images), device=images.labels.device)
    parts = {}
    for name, count in counts.items():
        chosen = stratified(images.labels[remaining], count, rng)
        parts[name] = select(images, remaining[chosen])
        remaining = remaining[~chosen]
    return parts


def duplicates(images: ImageSet, others: ImageSet) -> Tensor:
    """For each image its first exact double in `others`, or -1: (N,). Labels do not count; pixels are compared as 8-bit values.

    An auxiliary set with doubles of private images hands the attacker what it is meant to find; the record must say so.
    """
    if images.images.shape[1:] != others.images.shape[1:]:
        shapes = f"{tuple(images.images.shape[1:])} and {tuple(others.images.shape[1:])}"
        raise ValueError(f"duplicates: {images.name} and {others.name} must have one image shape, got {shapes}")
    first: dict[bytes, int] = {}
    for index, digest in enumerate(_digests(others)):
        first.setdefault(digest, index)
    return torch.tensor([first.get(digest, -1) for digest in _digests(images)])


def _digests(images: ImageSet) -> list[bytes]:
    pixels = images.images.mul(255).round().to(torch.uint8).cpu().numpy()
    return [hashlib.blake2b(picture.tobytes(), digest_size=16).digest() for picture in pixels]


def _count(name: str, size: int | float, total: int) -> int:
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"partition.{name}: expected a fraction in (0, 1], got {size:g}")
        count = math.floor(size * total + 1e-9)  # 0.29 · 100 is a hair below 29
    else:
        count = size
    if count < 1:
        raise ValueError(f"partition.{name}: expected at least one image, got {size} of {total}")
    return count
