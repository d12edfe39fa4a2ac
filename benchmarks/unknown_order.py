"""Pictures behind shuffled local epochs: `order_invariant` beside `inverting_gradients` with the wrong order, and nulls, on digits.

    python benchmarks/unknown_order.py [--seeds 0 1 2] [--epochs 1 5] [--batch 10] [--mini-batch 5] [--rate 0.05] [--steps 400] [--jobs 1]
        [--record FILE.json]

The client trains a small CNN on 8×8 digits, with a new order in each epoch. Both attacks are given the labels, in random order. Prints the
median PSNR over all samples of all seeds. Nulls: the mean of other digits, and the attack on the update of another client.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from measured import write_measurement

import dosimeter as dm
from dosimeter.registry import DATASETS, MODELS

ATTACKS = ("order_invariant", "inverting_gradients")
COLUMNS = ["epochs", "attack", "median PSNR [dB]", "on a foreign update [dB]", "mean of other digits [dB]", "samples"]


def client(seed: int, size: int) -> tuple[dm.Batch, dm.Batch, torch.Tensor]:
    """A client's digits, another client's, and the mean of the rest."""
    digits = DATASETS.build("digits")
    order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(seed))
    own, other, rest = order[:size], order[size : 2 * size], order[2 * size :]
    batches = [dm.Batch(digits.images[part], digits.labels[part]) for part in (own, other)]
    return batches[0], batches[1], digits.images[rest].mean(0)


def measure(attack: str, epochs: int, seed: int, chosen: argparse.Namespace) -> tuple[list[float], list[float], list[float]]:
    """PSNR of every sample: from the client's own update, from another client's, and of the mean digit."""
    torch.set_num_threads(1)
    own, other, mean = client(seed, chosen.batch)
    torch.manual_seed(seed)
    model = MODELS.build("fcn3", classes=10, channels=1, size=8, activation="sigmoid").eval()
    training = dm.FedAvg(learning_rate=chosen.rate, epochs=epochs, mini_batch=chosen.mini_batch, shuffle=True)
    scores = []
    for batch in (own, other):
        exposure = dm.observe(model, batch, training=training, seed=seed)
        dealt = batch.targets[torch.randperm(len(batch.targets), generator=torch.Generator().manual_seed(seed))]
        found = dm.reconstruct(exposure, attack, labels=dealt, seed=seed, steps=chosen.steps)
        scores.append(dm.score(found, own)["psnr"].tolist())
    error = (own.inputs - mean).flatten(1).square().mean(1)
    return scores[0], scores[1], (-10 * error.log10()).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--mini-batch", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--record", type=Path)
    chosen, rows = parser.parse_args(), []
    with ProcessPoolExecutor(chosen.jobs) as pool:
        cells = [(epochs, attack) for epochs in chosen.epochs for attack in ATTACKS]
        waiting = [[pool.submit(measure, attack, epochs, seed, chosen) for seed in chosen.seeds] for epochs, attack in cells]
        for (epochs, attack), results in zip(cells, waiting):
            columns = [[value for part in parts for value in part] for parts in zip(*(one.result() for one in results))]
            rows.append([epochs, f"`{attack}`", *(round(statistics.median(column), 1) for column in columns), len(columns[0])])
            print(*rows[-1], sep="  ", flush=True)
    if chosen.record:
        write_measurement(chosen.record, ", ".join(map(str, chosen.seeds)), COLUMNS, rows, [])


if __name__ == "__main__":
    main()
