"""How many of 50 and of 100 samples the bins of an inserted layer can determine at best, whatever the model.

    python benchmarks/bins_isolation.py [--draws 150] [--data DIR]

Bins are equally likely ones or, with --data, those of GradFilt's layer filled by images: images of one class where each class has
enough, else of any class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from dosimeter.attacks.gradfilt import FUNCTIONALS as GRADFILT
from dosimeter.data.load import load_images
from dosimeter.engines.bins.inserted_layer import insert_layer
from dosimeter.runs.reproduction.side_measures import bins_of_samples, determined_share

FUNCTIONALS = tuple(GRADFILT[:count] for count in (1, 2, 3, 4, 5))
BINS = 128
SAMPLES = (50, 100)
FILES = {"SVHN": "svhn.npz", "CIFAR-10": "cifar10.npz", "CIFAR-100": "cifar100.npz", "photographs": "imagenet_photos.zip"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--data", type=Path, help="folder with svhn.npz, cifar10.npz, cifar100.npz and imagenet_photos.zip")
    arguments = parser.parse_args()
    rng = torch.Generator().manual_seed(0)
    shares: dict[tuple[int, int], list[float]] = {}
    for count in SAMPLES:
        for functionals in FUNCTIONALS:
            sizes = [len(part) for part in torch.arange(BINS).tensor_split(len(functionals))]
            drawn = ([torch.randint(size, (count,), generator=rng) for size in sizes] for _ in range(arguments.draws))
            shares[count, len(functionals)] = [determined_share(bins) for bins in drawn]
    show("equal bins", shares)
    for name, file in FILES.items() if arguments.data else ():
        show(name, shares_of_images(arguments.data / file, 64 if name == "photographs" else None, arguments.draws, rng))


def shares_of_images(path: Path, size: int | None, number: int, rng: torch.Generator) -> dict[tuple[int, int], list[float]]:
    """The determined shares by number of samples and of functionals, one a draw."""
    images, shares = load_images(path, size=size), {}
    for functionals in FUNCTIONALS:
        shape = tuple(images.images.shape[1:])
        layer = insert_layer(nn.Linear(1, 1), shape, functionals, BINS, sparse=False, normalization=None, moments=None, round_number=0)
        bins = bins_of_samples(layer, images.images)
        for count in SAMPLES:
            drawn = draws(images.labels, count, number, rng)
            shares[count, len(functionals)] = [determined_share([part[rows] for part in bins]) for rows in drawn]
    return shares


def draws(labels: Tensor, count: int, number: int, rng: torch.Generator) -> list[Tensor]:
    """Rows of `count` samples, of each class in turn where all classes have as many."""
    sizes = torch.bincount(labels)
    classes = len(sizes) if int(sizes.min()) >= count else 0
    rows = []
    for draw in range(number):
        among = (labels == draw % classes).nonzero().flatten() if classes else torch.arange(len(labels))
        rows.append(among[torch.randperm(len(among), generator=rng)[:count]])
    return rows


def show(label: str, shares: dict[tuple[int, int], list[float]]) -> None:
    for (count, functionals), values in shares.items():
        mean, low = float(torch.tensor(values).mean()), float(torch.tensor(values).quantile(0.05))
        described = f"{count:3d} samples, {functionals} functionals in {BINS} bins"
        print(f"{label:12s} {described}: mean {mean:.2f}, 5 % of the draws below {low:.2f}", flush=True)


if __name__ == "__main__":
    main()
