"""The thesis's data sets with their models, and batches with target samples drawn from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.data.load import load_images
from dosimeter.models.loading import load_model

FILES = {
    "F-MNIST": "fashion-mnist",
    "SVHN": "svhn.npz",
    "CIFAR-10": "cifar10.npz",
    "CIFAR-100": "cifar100.npz",
    "ImageNet": "imagenet_photos.zip",
}
MODELS = {"F-MNIST": "lenet5", "SVHN": "convnet", "CIFAR-10": "vgg11", "CIFAR-100": "resnet18", "ImageNet": "resnet50"}
CLASSES = {"CIFAR-100": 100, "ImageNet": 1000}
STEMS = {"resnet18": "imagenet", "resnet50": "imagenet"}  # for photographs
QUICK_MODELS = {"resnet18": "resnet20", "resnet50": "resnet20"}
QUICK_OPTIONS = {"convnet": {"width": 4}, "vgg11": {"hidden": 256}}


@dataclass(frozen=True)
class Setting:
    """A data set of the thesis and its model, untrained and in eval mode."""

    name: str
    images: Tensor
    labels: Tensor
    model: nn.Module
    classes: int


@dataclass(frozen=True)
class Drawn:
    """A batch, its target classes, and the samples of them alone."""

    classes: tuple[int, ...]
    batch: dm.Batch
    own: dm.Batch

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.batch.inputs.shape[1:])


def setting(name: str, data: Path, seed: int, *, quick: bool = False, model: str | None = None, width: int | None = None) -> Setting:
    """One row of the tables; `model`, of `width`, instead of the one that the thesis pairs the data with."""
    size = {"F-MNIST": 28, "ImageNet": 64 if quick else 224}.get(name)
    images, labels = _images(data / FILES[name], data, name, size)
    classes = CLASSES.get(name, 10)
    if classes == 1000:
        labels = torch.randint(classes, (len(images),), generator=torch.Generator().manual_seed(seed))
    chosen = model or MODELS[name]
    options = {
        "classes": classes,
        "size": images.shape[-1],
        "channels": images.shape[1],
        **(QUICK_OPTIONS.get(chosen, {}) if quick else {}),
        **({"stem": STEMS[chosen]} if name == "ImageNet" and not quick and chosen in STEMS else {}),
        **({} if width is None else {"width": width}),
    }
    chosen = QUICK_MODELS.get(chosen, chosen) if quick else chosen
    return Setting(name, images, labels, load_model(chosen, options, None, seed).eval(), classes)


def told(name: str, data: Path) -> str:
    """A row's name with what stands in for its data."""
    if name == "F-MNIST" and not (data / FILES[name]).exists():
        return "F-MNIST (SVHN in gray)"
    return "ImageNet (photographs)" if name == "ImageNet" else name


def require_seeds(parser: argparse.ArgumentParser, seeds: Sequence[int]) -> None:
    if seeds[0] >= seeds[1]:
        parser.error(f"--seeds: expected FIRST below END, got {seeds[0]} {seeds[1]}")


@lru_cache(maxsize=8)
def _images(path: Path, data: Path, name: str, size: int | None) -> tuple[Tensor, Tensor]:
    """F-MNIST's place is taken by SVHN in gray where it is not at hand."""
    if name == "F-MNIST" and not path.exists():
        path = data / FILES["SVHN"]
    loaded = load_images(path, size=size, channels=1 if name == "F-MNIST" else None)
    return loaded.images, loaded.labels


def draw(chosen: Setting, targets: int, size: int, rng: torch.Generator, *, spread: bool = False) -> Drawn:
    """A batch of `size` with `targets` samples of one class, or each of a class of its own.

    Images of other classes are relabelled where a class has too few.
    """
    if spread:
        wanted = torch.randperm(chosen.classes, generator=rng)[:targets]
    else:
        wanted = torch.randint(chosen.classes, (1,), generator=rng).expand(targets)
    order = torch.randperm(len(chosen.images), generator=rng)
    strangers = order[~torch.isin(chosen.labels[order], wanted)]
    first: list[int] = []
    for one in wanted.tolist():
        rows = torch.cat([order[chosen.labels[order] == one], strangers]).tolist()
        first.append(next(row for row in rows if row not in first))
    others = strangers[~torch.isin(strangers, torch.tensor(first))]
    others = others[torch.randint(len(others), (size - targets,), generator=rng) if size - targets > len(others) else slice(size - targets)]
    rows = torch.cat([torch.tensor(first), others])
    labels = chosen.labels[rows].clone()
    labels[:targets] = wanted
    own = dm.Batch(chosen.images[first], labels[:targets])
    mixed = torch.randperm(size, generator=rng)
    return Drawn(tuple(wanted.unique().tolist()), dm.Batch(chosen.images[rows[mixed]], labels[mixed]), own)
