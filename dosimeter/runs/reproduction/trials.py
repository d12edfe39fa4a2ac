"""One trial of a row: a random private batch, its model, and the auxiliary samples of the server."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from dosimeter.client.losses import as_distribution
from dosimeter.config import describe, digest
from dosimeter.data.dataset import ImageSet, by_class
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator
from dosimeter.runs.audited_client import fingerprints_of
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.library import Library, content_hash
from dosimeter.runs.reproduction.tables import Granted, Row, Softening
from dosimeter.runs.reproduction.targets import TargetedDraw, draw_with_targets
from dosimeter.types import Batch
from dosimeter.version import __version__

OPTIONAL_SETTINGS = ("targets", "one_model", "backbone", "decoder", "foreign", "reference")  # of a row; most rows lack them


def trial_key(row: Row, library: Library, seed: int) -> str:
    """The key of a trial in the records: a hash of its setting, its seed and the images."""
    images = _private_images(row, library)
    setting = {"model": row.model, "data": row.data, "seed": seed, "version": __version__, "images": content_hash(images)}
    chosen = {name: value for name in OPTIONAL_SETTINGS if (value := getattr(row, name))}  # absent settings do not change the key
    return digest({name: describe(value) for name, value in (setting | chosen).items()})


def client_of(row: Row, library: Library, seed: int, device: str) -> AuditedClient:
    """The trial's client. Every random draw depends on `seed` alone. Each trial draws its own untrained model."""
    images, data = _private_images(row, library), row.data
    targeted = None if row.targets is None else targeted_draw(row, library, seed)
    chosen = _draw_private(images, row, seed) if targeted is None else targeted.indices  # (B,), or (2B,) for mixup
    fixed = row.model.seed if row.one_model else seed  # seed of the model and the auxiliary images, which batches may share
    model = library.model(row.model, data, images, fixed, backbone=row.backbone).to(device)
    model.train(row.model.mode == "train")
    classes = _classes(row, images)

    def batch(from_images: ImageSet, indices: Tensor) -> Batch:
        return Batch(from_pixels(from_images.images[indices], data.normalization).to(device), from_images.labels[indices].to(device))

    private = batch(images, chosen)
    if targeted is not None:
        private = Batch(private.inputs, targeted.labels.to(device))
    if data.relabelled is not None:
        labels = arbitrary_labels(len(chosen), data.relabelled, classes, generator(seed, "labels"))
        private = Batch(private.inputs, labels.to(device))
    if data.softening is not None:
        private = soften_labels(private, data.softening, classes, generator(seed, "soft labels"))
    auxiliary = None
    if data.auxiliary is not None:
        source = auxiliary_images(row, library)
        taken = chosen if data.auxiliary.part == "rest" else chosen[:0]
        rng = generator(fixed, "auxiliary")
        auxiliary = batch(source, draw_balanced(source.labels, len(source.class_names), data.auxiliary, taken, rng))
    return AuditedClient(
        model=model,
        batch=private,
        foreign=_foreign(row, library, seed, private, batch) if row.foreign else None,
        auxiliary=auxiliary,
        reference=batch(images, _others(images, chosen, row.reference, seed)) if row.reference else None,
        normalization=data.normalization,
        description={
            "row": row.name,
            "trial": trial_key(row, library, seed),
            "model": row.model.name,
            "stage": _stage(row),
            "data": images.name,
            **library.accuracy(row.model, data, images),
            **fingerprints_of(model, private),
            **({} if targeted is None else {"targets": list(targeted.positions)}),
        },
    )


def targeted_draw(row: Row, library: Library, seed: int) -> TargetedDraw:
    """A trial's batch with target samples. Where the model has more classes than the images, labels are random."""
    assert row.targets is not None
    images = _private_images(row, library)
    classes, labels = _classes(row, images), images.labels
    if classes > len(images.class_names):
        labels = torch.randint(classes, (len(images),), generator=generator(seed, "labels"))
    return draw_with_targets(labels, classes, row.targets, row.data.batch_size, generator(seed, "private batch"))


def substitutions(row: Row, library: Library) -> list[str]:
    """A sentence for each departure of a row that the available data force."""
    said = []
    granted = row.data.auxiliary
    for wanted in (row.data, granted):
        if wanted is None or wanted.name is None:
            continue
        if (used := library.available(wanted.name, wanted.stand_in)) != wanted.name:
            said.append(f"{used} stood in for {wanted.name}, which is not at hand")
    if granted is not None:
        images = auxiliary_images(row, library)
        classes = len(images.class_names)
        share = granted.per_class or -(-(granted.total or 0) // classes)
        available = torch.bincount(images.labels, minlength=classes)
        if int(available.min()) < share:
            counts = f"{int(available.min())} to {min(int(available.max()), share)}"
            said.append(f"{images.name} has {counts} auxiliary samples a class in place of {share}")
    return said


def arbitrary_labels(size: int, present: int, classes: int, rng: Generator) -> Tensor:
    """Random labels from `present` classes, each of which occurs at least once: (B,)."""
    if not present <= min(size, classes):
        raise ValueError(f"data.relabelled: expected at most {min(size, classes)} classes for {size} samples of {classes}, got {present}")
    chosen = torch.randperm(classes, generator=rng)[:present]
    return chosen[torch.cat([torch.arange(present), torch.randint(present, (size - present,), generator=rng)])]


def soften_labels(batch: Batch, softening: Softening, classes: int, rng: Generator) -> Batch:
    """The batch with soft labels. Mixup blends the second half of a batch (2B, ...) into the first."""
    labels = as_distribution(batch.targets, classes, batch.inputs.dtype)
    if softening.kind == "one_hot":
        return Batch(batch.inputs, labels)
    pairs = len(labels) // 2 if softening.kind == "mixup" else len(labels)
    weight = softening.low + (softening.high - softening.low) * torch.rand(pairs, generator=rng).to(labels)  # (B,)
    if softening.kind == "smoothing":
        return Batch(batch.inputs, (1 - weight[:, None]) * labels + weight[:, None] / classes)
    if bool((batch.targets[:pairs] == batch.targets[pairs:]).any()):
        raise ValueError("data.softening: mixup wants pairs of different classes; data.sampler = 'unique' gives them")
    share = weight.view(-1, *[1] * (batch.inputs.ndim - 1))
    mixed = share * batch.inputs[:pairs] + (1 - share) * batch.inputs[pairs:]
    return Batch(mixed, weight[:, None] * labels[:pairs] + (1 - weight[:, None]) * labels[pairs:])


def draw_balanced(labels: Tensor, classes: int, granted: Granted, taken: Tensor, rng: Generator) -> Tensor:
    """Indices of equally many samples of each class, as far as the data reach, without those `taken`."""
    share = granted.per_class or -(-(granted.total or 0) // classes)
    free = torch.arange(len(labels))[~torch.isin(torch.arange(len(labels)), taken)]
    order = free[by_class(labels[free], rng)]
    counts = torch.bincount(labels[free], minlength=classes)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[labels[order]]  # place within its class
    return order[rank < share]


def auxiliary_images(row: Row, library: Library) -> ImageSet:
    granted, data = row.data.auxiliary, row.data
    assert granted is not None
    part = data.part if granted.part == "rest" else granted.part
    name, stand_in = (data.name, data.stand_in) if granted.name is None else (granted.name, granted.stand_in)
    return library.images(library.available(name, stand_in), part, data)


def _private_images(row: Row, library: Library) -> ImageSet:
    return library.images(library.available(row.data.name, row.data.stand_in), row.data.part, row.data)


def _draw_private(images: ImageSet, row: Row, seed: int) -> Tensor:
    soft = row.data.softening
    count = row.data.batch_size * (2 if soft is not None and soft.kind == "mixup" else 1)
    return row.data.sampler(images.labels, count, len(images.class_names), generator(seed, "private batch"))


def _others(images: ImageSet, taken: Tensor, count: int, seed: int) -> Tensor:
    """Indices of at most `count` images that are not in the batch."""
    order = torch.randperm(len(images), generator=generator(seed, "reference"))
    return order[~torch.isin(order, taken)][:count]


def _foreign(row: Row, library: Library, seed: int, private: Batch, batch: Callable[[ImageSet, Tensor], Batch]) -> Batch:
    """Another client's batch: other images with the private batch's labels, so that the labels make no difference."""
    images = _private_images(row, library)
    taken = _draw_private(images, row, seed) if row.targets is None else targeted_draw(row, library, seed).indices
    return Batch(batch(images, _others(images, taken, len(private.inputs), seed)).inputs, private.targets)


def _classes(row: Row, images: ImageSet) -> int:
    """The number of the model's logits, which may exceed the number of classes in the images."""
    return int(row.model.options.get("classes", len(images.class_names)))


def _stage(row: Row) -> str:
    if row.model.weights is not None:
        return f"weights {row.model.weights}"
    if not row.model.epochs:
        return "untrained"
    length = "1 epoch" if row.model.epochs == 1 else f"{row.model.epochs} epochs"
    return f"{length} here" + (f" on {row.data.trained_on} images" if row.data.trained_on else "")
