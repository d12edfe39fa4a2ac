"""Train and test parts: a set's own where it has them, else the same fixed fifth of every class."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from dosimeter.data.dataset import ImageSet, select, stratified_mask
from dosimeter.randomness import generator

Part = Literal["train", "test", "all"]
VALIDATION = ("val", "valid", "validation")  # stands in where a set names no test part
TEST_SHARE = 5  # one image in five


def own_parts(found: Collection[str], part: Part, origin: object) -> list[str]:
    """Which of a set's own parts make up `part`."""
    if part == "all":
        return [name for name in ("train", "test", *VALIDATION) if name in found]
    wanted = [part] if part in found or part == "train" else [name for name in VALIDATION if name in found]
    if not wanted or wanted[0] not in found:
        raise ValueError(f"{origin}: has no {part} part, only {', '.join(sorted(found))}")
    return wanted


def standard_part(images: ImageSet, part: Part) -> ImageSet:
    """The train or test part of a set that names none: one image in five of each class is for testing, always the same ones."""
    if part == "all":
        return images
    if part not in ("train", "test"):
        raise ValueError(f"part: expected 'train', 'test' or 'all', got {part!r}")
    size = len(images) // TEST_SHARE
    if size == 0:
        raise ValueError(f"{images.name}: {len(images)} images are too few for a {part} part; ask for part='all'")
    testing = stratified_mask(images.labels, size, generator(0, "test part"))
    return select(images, testing if part == "test" else ~testing)
