"""Label counts after local epochs: `rlu` beside `ilrg`, over epochs, optimisers and shuffling, on an untrained and a trained LeNet-5.

    python benchmarks/local_epochs.py --data DIR [--batches 20] [--epochs 1 2 5 10] [--optimisers sgd momentum adam]
        [--orders fixed shuffled once] [--models untrained trained] [--simulations 32] [--rounds 2]
        [--jobs 16] [--record FILE.json]

DIR holds cifar10.npz. The trained model learns from the first images of the training set. Private batches come from the others,
auxiliary samples are the test images. Labels of a client are drawn from Dirichlet(0.5). Prints InsAcc, a Jaccard index of the label
multisets, and the share of labels that are right.

A client has 32 images and passes over them in mini-batches of 8, in a `fixed` order or `shuffled` in each epoch. With `once`, each of its
m "local epochs" is one step on 32 images that it has not seen before, so that it has 32 m: so counts the code that Chen and Vikalo
published with RLU (github.com/CityChan/Recovering-Label-from-Update, client/client_base.py), where `local_epochs` mini-batches make one
update and `batch_size * local_epochs` labels are counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from measured import write_measurement

import dosimeter as dm
from dosimeter.models.loading import load_model
from dosimeter.types import Refused

CLASSES, BATCH, MINI_BATCH = 10, 32, 8
LESSONS, LESSON_EPOCHS = 1000, 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.01},
    "momentum": {"learning_rate": 0.01, "momentum": 0.9},
    "adam": {"learning_rate": 0.001, "optimizer": "adam"},
}
COLUMNS = ["model", "optimiser", "order", "epochs", "InsAcc rlu", "labels right rlu", "InsAcc ilrg", "labels right ilrg", "CPU s a batch"]


@cache
def images_of(folder: str, part: str) -> dm.Batch:
    with np.load(Path(folder) / "cifar10.npz") as data:
        pixels = torch.from_numpy(data[f"{part}_images"]).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(data[f"{part}_labels"]).long()
    scale = dm.Normalization(mean=MEAN, std=STD)
    return dm.Batch((pixels - torch.tensor(scale.mean)[:, None, None]) / torch.tensor(scale.std)[:, None, None], labels)


@cache
def network(folder: str, trained: bool) -> nn.Module:
    model = load_model("lenet5", {"classes": CLASSES, "channels": 3, "size": 32}, None, seed=0).eval()
    if trained:
        lessons = images_of(folder, "train")
        training = dm.FedAvg(learning_rate=0.01, momentum=0.9, epochs=LESSON_EPOCHS, mini_batch=32)
        update = training(model, lessons.inputs[:LESSONS], lessons.targets[:LESSONS], dm.CrossEntropy())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(training.unit(LESSONS) * update[name])
    return model


def client(folder: str, seed: int, size: int = BATCH) -> tuple[dm.Batch, Tensor]:
    """A batch of images that no model has seen, and its label counts. No class gives more images than it has; then others give more."""
    rng, images = torch.Generator().manual_seed(seed), images_of(folder, "train")
    shares = torch._sample_dirichlet(torch.full((CLASSES,), 0.5), rng)
    rest = torch.arange(LESSONS, len(images.targets))
    stock = torch.bincount(images.targets[rest], minlength=CLASSES)
    wanted = torch.bincount(torch.multinomial(shares, size, replacement=True, generator=rng), minlength=CLASSES).minimum(stock)
    while missing := size - int(wanted.sum()):
        more = torch.multinomial(shares * (wanted < stock), missing, replacement=True, generator=rng)
        wanted = (wanted + torch.bincount(more, minlength=CLASSES)).minimum(stock)
    rest = rest[torch.randperm(len(rest), generator=rng)]
    chosen = torch.cat([rest[images.targets[rest] == label][: int(count)] for label, count in enumerate(wanted)])
    chosen = chosen[torch.randperm(len(chosen), generator=rng)]
    return dm.Batch(images.inputs[chosen], images.targets[chosen]), wanted


def measure(folder: str, model: str, optimiser: str, order: str, epochs: int, seed: int, **options: int) -> tuple[float, ...]:
    """InsAcc and the share of right labels of rlu, both of ilrg, and the processor's seconds of rlu."""
    torch.set_num_threads(1)
    passes = {"epochs": 1, "mini_batch": BATCH} if order == "once" else {"epochs": epochs, "mini_batch": MINI_BATCH}
    batch, wanted = client(folder, seed, BATCH * epochs if order == "once" else BATCH)
    training = dm.FedAvg(shuffle=order == "shuffled", **passes, **OPTIMISERS[optimiser])
    known = {"training": training, "auxiliary": images_of(folder, "test"), "normalization": dm.Normalization(mean=MEAN, std=STD)}
    exposure = dm.observe(network(folder, model == "trained"), batch, seed=seed, **known)
    started = time.process_time()
    counts = dm.recover_labels(exposure, "rlu", seed=seed, **options).counts
    seconds = time.process_time() - started
    try:
        other = dm.recover_labels(exposure, "ilrg", seed=seed).counts
    except Refused:
        return agreement(counts, wanted), right(counts, wanted), float("nan"), float("nan"), seconds
    return agreement(counts, wanted), right(counts, wanted), agreement(other, wanted), right(other, wanted), seconds


def right(counts: Tensor, wanted: Tensor) -> float:
    return float(torch.minimum(counts, wanted).sum() / wanted.sum())


def agreement(counts: Tensor, wanted: Tensor) -> float:
    return float(torch.minimum(counts, wanted).sum() / torch.maximum(counts, wanted).sum())


def accuracy(folder: str, trained: bool) -> float:
    images = images_of(folder, "test")
    with torch.no_grad():
        return float((network(folder, trained)(images.inputs).argmax(1) == images.targets).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--optimisers", nargs="+", default=list(OPTIMISERS), choices=list(OPTIMISERS))
    parser.add_argument("--orders", nargs="+", default=["fixed", "shuffled"], choices=["fixed", "shuffled", "once"])
    parser.add_argument("--models", nargs="+", default=["untrained", "trained"], choices=["untrained", "trained"])
    parser.add_argument("--simulations", type=int, help="clients that rlu simulates in a round")
    parser.add_argument("--rounds", type=int, help="rounds of rlu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    reached = accuracy(chosen.data, True)
    lessons = f"{LESSON_EPOCHS} epochs over {LESSONS} images"
    said = f"The trained model classifies {reached:.1%} of the auxiliary images correctly, after {lessons}."
    print(said)
    seeds, rows = range(chosen.seed, chosen.seed + chosen.batches), []
    options = {name: value for name in ("simulations", "rounds") if (value := getattr(chosen, name)) is not None}
    cells = list(itertools.product(chosen.models, chosen.optimisers, chosen.orders, chosen.epochs))
    with ProcessPoolExecutor(chosen.jobs) as pool:
        waiting = {cell: [pool.submit(measure, chosen.data, *cell, seed, **options) for seed in seeds] for cell in cells}
        for (model, optimiser, order, epochs), results in waiting.items():
            found = [statistics.mean(column) for column in zip(*(one.result() for one in results))]
            names = [model, optimiser, order, epochs]
            figures = ["refused" if np.isnan(one) else round(one, 3) for one in found[:-1]]
            rows.append([*names, *figures, round(found[-1], 1)])
            print(*rows[-1], sep="  ", flush=True)
            if chosen.record:
                write_measurement(chosen.record, f"{seeds[0]} to {seeds[-1]}", COLUMNS, rows, [said])


if __name__ == "__main__":
    main()
