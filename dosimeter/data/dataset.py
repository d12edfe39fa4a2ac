"""A set of labelled images, and operations on the whole set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.data.pixels import convert_channels, square


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """Labelled images as pixels in [0, 1], checked when built."""

    name: str
    images: Tensor  # (N, channels, H, W) float32 in [0, 1]
    labels: Tensor  # (N,) int64, each below len(class_names)
    class_names: tuple[str, ...]
    origin: str  # where the pixels come from

    def __post_init__(self) -> None:
        images, labels, where = self.images, self.labels, f"{self.name} ({self.origin})"
        if images.ndim != 4 or images.dtype != torch.float32:
            raise ValueError(f"{where}: expected images (N, channels, H, W) float32, got {tuple(images.shape)} {images.dtype}")
        if images.numel() == 0:
            raise ValueError(f"{where}: expected at least one image, got shape {tuple(images.shape)}")
        if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(f"{where}: expected {len(images)} int64 labels, got {tuple(labels.shape)} {labels.dtype}")
        low, high = images.aminmax()
        if not (low >= 0 and high <= 1):
            raise ValueError(f"{where}: expected pixels in [0, 1], got {low:g} to {high:g}")
        if labels.min() < 0 or labels.max() >= len(self.class_names):
            span = f"{int(labels.min())}..{int(labels.max())}"
            raise ValueError(f"{where}: class ids must lie in 0..{len(self.class_names) - 1}, got {span}")
        object.__setattr__(self, "images", images.contiguous())  # the layout in memory must not change what a network computes

    def __len__(self) -> int:
        return len(self.images)


def select(images: ImageSet, indices: Tensor | Sequence[int]) -> ImageSet:
    """The images at `indices` (or where a boolean mask holds), in that order."""
    indices = torch.as_tensor(indices, device=images.labels.device)
    return replace(images, images=images.images[indices], labels=images.labels[indices])


def resize(images: ImageSet, size: int) -> ImageSet:
    """The central square of each image at `size` pixels a side."""
    if size < 1:
        raise ValueError(f"{images.name}: expected a positive size, got {size}")
    return replace(images, images=square(images.images, size))


def with_channels(images: ImageSet, channels: int) -> ImageSet:
    """The set in gray (1) or RGB (3)."""
    return replace(images, images=convert_channels(images.images, channels))


def fit(images: ImageSet, size: int | None, channels: int | None) -> ImageSet:
    """The set at `size` pixels a side and with that many channels; None leaves either as it is."""
    images = images if size is None else resize(images, size)
    return images if channels is None else with_channels(images, channels)


def stratified_mask(labels: Tensor, size: int, rng: Generator) -> Tensor:
    """A mask (N,) of exactly `size` samples, with size · n_c / N of each class to within one.

    The samples are ordered by class and taken at even steps of N / size from a random offset. A class of n_c samples then
    gets its share, rounded down or up.
    """
    total = len(labels)
    offset = torch.randint(total, (1,), generator=rng, device=rng.device).to(labels.device)
    marks = (torch.arange(total + 1, device=labels.device) * size + offset) // total  # (N + 1,)
    mask = torch.empty(total, dtype=torch.bool, device=labels.device)
    mask[by_class(labels, rng)] = marks.diff() > 0
    return mask


def by_class(labels: Tensor, rng: Generator) -> Tensor:
    """The indices (N,) in ascending order of class, shuffled within each."""
    order = torch.randperm(len(labels), generator=rng, device=rng.device).to(labels.device)
    return order[torch.argsort(labels[order], stable=True)]
