# ruff: noqa: T201
"""RGLA's setting: the target, its decoder, the private and the auxiliary images; carries out rows of tables and prints them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pretrained import target
from rows import pooled
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.data.dataset import ImageSet
from dosimeter.data.load import load_images
from dosimeter.data.pixels import square
from dosimeter.engines.decoder.cache import Trained, load_decoder, trained
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import DecoderSettings, decode_without_slope
from dosimeter.models.resnet_cifar import CifarResNet
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.randomness import generator
from dosimeter.records import write_record
from dosimeter.runs.experiment import run
from dosimeter.runs.measurement import AuditedClient, Measurement
from dosimeter.surfaces import pictures
from dosimeter.types import Batch, Normalization, Record

PRIVATE = ("CIFAR-100", "photographs")
METHODS = ("fgla", "subspace", "rgla as published")
KEPT_NULLS = 256  # auxiliary images beside the nearest ones, which the nulls are drawn from
PICTURES = {
    "8: 8/8, subspace",
    "8: 8/8, fgla",
    "10: B=256, subspace",
    "photographs, subspace",
    "12: pruned 99.9%, subspace",
}
SHOWN = 4  # samples of a batch


def read_auxiliary(folder: Path, most: int | None) -> Tensor:
    """CIFAR-10's training images from the package's strips, or from an npz: (N, 3, 32, 32) in [0, 1]."""
    import numpy as np
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    if folder.suffix == ".npz":
        return torch.from_numpy(np.load(folder)["train_images"]).permute(0, 3, 1, 2)[:most].float() / 255
    strips = [np.asarray(Image.open(path).convert("RGB")).reshape(-1, 32, 32, 3) for path in sorted(folder.glob("data_batch_*.png"))]
    images = torch.from_numpy(np.concatenate(strips)).permute(0, 3, 1, 2)
    return images[:most].float() / 255


def twin(_: Path | None, *, classes: int, size: int, seed: int) -> nn.Module:
    """The paper's target in small: an untrained residual network of eight layers, without pooling, in train mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CifarResNet(3, 1, classes, "relu", True)
        model.pool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        model.linear = nn.Linear(64 * (size // 4) ** 2, classes)
    return model.train()


class Bench:
    """The target, its decoder, and the private and auxiliary images; carries out rows and prints them."""

    def __init__(self, options: argparse.Namespace, size: int, start: Trained | None = None) -> None:
        self.options, self.size, self.device = options, size, torch.device(options.device)
        self.scale = Normalization()
        build = twin if options.twin else target
        self.model = build(options.backbone, classes=options.classes, size=size, seed=options.seed).to(self.device)
        self.auxiliary = read_auxiliary(options.auxiliary, options.auxiliary_images).to(self.device)
        self.private = {
            "CIFAR-100": load_images(options.data / "cifar100.npz", part="test"),
            "photographs": load_images(options.data / "imagenet_photos.zip", size=size),
        }
        self.trained = self._train(start)

    def _train(self, start: Trained | None) -> Trained:
        options = self.options
        settings = DecoderSettings(
            width=options.width,
            finest=options.finest,
            epochs=options.epochs,
            fine_tuning_epochs=options.fine_tuning_epochs,
            seconds=options.training_seconds[options.sizes.index(self.size)] if options.training_seconds else None,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            client_batch_sizes=(8, 16, 32, 64, 128, 256),
            mosaics=options.mosaics,
            sharpened=options.sharpened,
            coloured=options.coloured,
            reuse=options.reuse,
            seed=options.seed,
        )
        began = time.perf_counter()
        view = Target.from_model(self.model, (3, self.size, self.size), self.scale)
        if options.decoder is not None and self.size == options.sizes[0]:
            return load_decoder(options.decoder, view)
        if options.start is not None and start is None:
            start = load_decoder(options.start, view)
        print(f"{self.size} px: features {view.feature_shape}, {len(self.auxiliary)} auxiliary images, {settings}", flush=True)
        torch.backends.cudnn.benchmark = True  # in training alone, where every batch has one shape
        found = trained(view, self.auxiliary, settings, options.out / f"decoder-{self.size}.safetensors", start=start)
        torch.backends.cudnn.benchmark = False
        print(f"{self.size} px: {found.origin}, {time.perf_counter() - began:.0f} s", flush=True)
        return found

    def develop(self) -> None:
        """How well exact features of images are drawn on which nothing is reported: settings may be chosen by them."""
        view = Target.from_model(self.model, (3, self.size, self.size), self.scale)
        folder = self.options.data
        sources = (
            ("CIFAR-10", load_images(folder / "cifar10.npz", part="test")),
            ("flowers", load_images(folder / "flowers17.zip", size=self.size)),
        )
        for name, source in sources if self.options.development else ():
            images = square(source.images[: self.options.development].to(self.device), self.size)
            for size in (8, 64, 256):
                if size <= len(images):
                    drawn = decode_without_slope(self.trained.decoder, view.features_in_batches(images, size))
                    error = (drawn - images).square().mean((1, 2, 3))
                    print(f"development: {name}, batches of {size}: {float(-10 * error.log10().mean()):.2f} dB", flush=True)

    def batch(self, data: str, size: int, number: int, labels: Tensor | None = None, *, foreign: bool = False) -> Batch:
        """The images of one fixed order in batches, so that rows of other sizes show the same ones; foreign batches come from its end.

        Labels are drawn at random from all classes, each once, unless they are given.
        """
        images: ImageSet = self.private[data]
        order = self.order(data)
        chosen = (order.flip(0) if foreign else order)[number * size : (number + 1) * size]
        pixels = square(images.images[chosen].to(self.device), self.size)
        rng = generator(self.options.seed, f"labels {size} {number} {foreign}")
        drawn = torch.randperm(self.options.classes, generator=rng)[:size] if labels is None else labels
        return Batch(from_pixels(pixels, self.scale), drawn.to(self.device))

    def batches(self, data: str, size: int, count: int, labels: Tensor | None = None, *, foreign: bool = False) -> dict[int, Batch]:
        """Some batches by their numbers."""
        first = self.options.first_batch
        return {number: self.batch(data, size, number, labels, foreign=foreign) for number in range(first, first + count)}

    def order(self, data: str) -> Tensor:
        return torch.randperm(len(self.private[data]), generator=generator(self.options.seed, f"private {data}"))

    def subject(self, row: str, published: float | None, batch: Batch, foreign: Batch | None) -> AuditedClient:
        known = from_pixels(self.known(batch), self.scale)
        labels = torch.zeros(len(known), dtype=torch.int64, device=self.device)
        name = "untrained ResNet-8" if self.options.twin else "ResNet-50, ImageNet backbone"
        return AuditedClient(
            model=self.model,
            batch=batch,
            foreign=foreign,
            auxiliary=Batch(known, labels),
            normalization=self.scale,
            description={"model": f"{name}, random head, no pooling", "data": row, "published": published},
        )

    def known(self, batch: Batch) -> Tensor:
        """The auxiliary image nearest to each private one, of all, and some others: (n, 3, size, size)."""
        small = square(to_pixels(batch.inputs, self.scale), 32)
        nearest = torch.cdist(small.flatten(1), self.auxiliary.flatten(1)).argmin(1)
        some = torch.arange(min(KEPT_NULLS, len(self.auxiliary)), device=self.device)
        return square(self.auxiliary[torch.cat([nearest, some]).unique()], self.size)

    def row(
        self, name: str, batches: dict[int, Batch], *, foreign: dict[int, Batch] | None = None, published: float | None = None, **terms: Any
    ) -> None:
        """One method on some batches; per-sample scores are pooled."""
        terms.setdefault("labels", "given")
        records: list[Record] = []
        for number, batch in batches.items():
            pictures.MOST = SHOWN if name in PICTURES and number == 0 else 0  # drawing and packing them takes longer than the attack
            other = None if self.options.without_foreign else (foreign or {}).get(number)
            subject = self.subject(f"{name}, batch {number}", published, batch, other)
            records.append(run(subject, Measurement(**terms, seed=self.options.seed + number)))
            write_record(self.options.out, records[-1])
        print(json.dumps(pooled(name, records), ensure_ascii=False), flush=True)

    def attack(self, name: str, **options: Any) -> Any:
        return dm.attack(name, decoder=str(self.trained.path), **options)

    def methods(self, published: bool = True) -> Iterator[tuple[str, Any]]:
        """The methods of a row; the published one, which takes longest, only where it is asked for."""
        for name in self.options.methods:
            if name == "fgla":
                yield name, self.attack("fgla")
            elif name == "subspace":
                yield name, self.attack("rgla", features="subspace")
            elif published:
                yield name, self.attack("rgla", features="rgla", steps=self.options.published_steps)
