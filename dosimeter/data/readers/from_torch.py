"""Any torch Dataset, or any iterable of (image, label)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosimeter.data.dataset import ImageSet
from dosimeter.data.pixels import from_pillow, scaled, square
from dosimeter.data.readers.classes import numbered


def from_torch(dataset: Iterable[Any], *, name: str = "", size: int | None = None, class_names: Sequence[str] | None = None) -> ImageSet:
    """Reads a dataset whole: (image, label) pairs, an image being a tensor or array (channels, H, W) or (H, W), or a Pillow image.

    Class names come from the dataset's `classes` where it has them.
    """
    name = name or type(dataset).__name__
    images, labels = [], []
    for index, item in enumerate(_items(dataset)):
        origin = f"{name}[{index}]"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(f"{origin}: expected a pair (image, label), got {type(item).__name__}")
        image = _pixels(item[0], origin)
        images.append(image if size is None else square(image, size))
        labels.append(_label(item[1], origin))
    if not images:
        raise ValueError(f"{name}: expected at least one (image, label), found none")
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise ValueError(f"{name}: its images differ in shape (such as {shapes[0]} and {shapes[-1]}); pass size=, and one mode of colour")
    ids = torch.tensor(labels)
    names = class_names or getattr(dataset, "classes", None) or numbered(ids)
    return ImageSet(
        name=name,
        images=torch.stack(images),
        labels=ids,
        class_names=tuple(map(str, names)),
        origin=f"{type(dataset).__module__}.{type(dataset).__qualname__}",
    )


def _items(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):  # a map-style Dataset need not end in IndexError
        return (dataset[index] for index in range(len(dataset)))
    return iter(dataset)


def _pixels(image: Any, origin: str) -> Tensor:
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        return from_pillow(image)
    if not isinstance(image, (Tensor, np.ndarray)):
        raise TypeError(f"{origin}: expected a tensor, an array or a Pillow image, got {type(image).__name__}")
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[0] not in (1, 3):
        raise ValueError(f"{origin}: expected one image (channels, H, W) with 1 or 3 channels, got shape {tuple(array.shape)}")
    return scaled(array, origin)


def _label(label: Any, origin: str) -> int:
    value = label.item() if isinstance(label, (Tensor, np.generic)) and label.ndim == 0 else label
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{origin}: expected a class id (an integer of at least 0) as label, got {label!r}")
    return value
