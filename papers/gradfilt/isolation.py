# ruff: noqa: T201
"""How many of 50 and of 100 samples the bins of an inserted layer can show, whatever the model: alone, and by what all bins hold.

    python papers/gradfilt/isolation.py [--draws 150] [--data ../shared/data]

Bins are equally likely ones, or those of GradFilt's layer filled by images: of one class where a class has enough, else by any.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from settings import setting
from torch import Tensor, nn

from dosimeter.attacks.gradfilt import FUNCTIONALS as GRADFILT
from dosimeter.engines.bins.inserted_layer import InsertedLayer, insert_layer

FUNCTIONALS = tuple(GRADFILT[:count] for count in (1, 2, 3, 4, 5))
BINS = 128


def settled(bins: list[Tensor]) -> float:
    """The share of samples that the bins' contents determine, each bin (n,) of each functional holding the sum of its samples.

    With A marking the bins of each sample, those are the samples whose unit vector lies in A's row space: those alone in a bin,
    those alone once others are taken out, and those that linear equations between bins settle.
    """
    marks = torch.cat([torch.nn.functional.one_hot(places, int(places.max()) + 1).T for places in bins]).double()  # (m, n)
    _, sizes, right = torch.linalg.svd(marks, full_matrices=False)
    within = right[sizes > 1e-9 * sizes.max()].square().sum(0)
    return float((within > 1 - 1e-9).double().mean())


def bins_of(layer: InsertedLayer, inputs: Tensor) -> list[Tensor]:
    """The bin of each sample under each functional: how many of its edges lie below the sample."""
    with torch.no_grad():
        return [part.sum(1) for part in (layer.rows(inputs.flatten(1)) > 0).split(layer.bins, 1)]


def show(label: str, shares: dict[tuple[int, int], list[float]]) -> None:
    for (count, functionals), found in shares.items():
        values = torch.tensor(found)
        line = f"mean {float(values.mean()):.2f}, 5 % of the draws below {float(values.quantile(0.05)):.2f}"
        print(f"{label:12s} {count:3d} samples, {functionals} functionals in {BINS} bins: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    rng = torch.Generator().manual_seed(0)
    shares: dict[tuple[int, int], list[float]] = {}
    for count in (50, 100):
        for functionals in FUNCTIONALS:
            sizes = [len(part) for part in torch.arange(BINS).tensor_split(len(functionals))]
            drawn = ([torch.randint(size, (count,), generator=rng) for size in sizes] for _ in range(arguments.draws))
            shares[count, len(functionals)] = [settled(bins) for bins in drawn]
    show("equal bins", shares)
    for name in ("SVHN", "CIFAR-10", "CIFAR-100", "ImageNet"):
        chosen, shares = setting(name, arguments.data, 0, quick=True, model="small_cnn"), {}
        shape = tuple(chosen.images.shape[1:])
        for functionals in FUNCTIONALS:
            layer = insert_layer(nn.Linear(1, 1), shape, functionals, BINS, sparse=False, normalization=None, moments=None, round_number=0)
            bins = bins_of(layer, chosen.images)
            for count in (50, 100):
                shares[count, len(functionals)] = [
                    settled([part[rows] for part in bins]) for rows in draws(chosen.labels, count, arguments.draws, rng)
                ]
        show(name, shares)


def draws(labels: Tensor, count: int, number: int, rng: torch.Generator) -> list[Tensor]:
    """Rows of `count` samples, of each class in turn where all have as many."""
    order = torch.bincount(labels)
    classes = len(order) if int(order.min()) >= count else 0
    rows = []
    for draw in range(number):
        among = (labels == draw % classes).nonzero().flatten() if classes else torch.arange(len(labels))
        rows.append(among[torch.randperm(len(among), generator=rng)[:count]])
    return rows


if __name__ == "__main__":
    main()
