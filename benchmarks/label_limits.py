"""What keeps `rlu` from the labels of a trained model: more simulated clients, more of the update, or the samples themselves?

    python benchmarks/label_limits.py --data DIR [--simulations 256] [--clients 40] [--seed 2750] [--record FILE.json]

The setting is that of local_epochs.py: a trained LeNet-5, ten local epochs of SGD over 32 CIFAR-10 images in shuffled mini-batches of 8.
Counts are regressed on what simulated clients show, once and without a second round. `statistics`: what `rlu` reads. `every layer`: a ridge
regression of what is left on all entries of the update. `own kind`: the clients are simulated ones too, of the server's own images, so that
no difference of the image sets is in the way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from local_epochs import BATCH, MEAN, MINI_BATCH, STD, client, images_of, network, right
from measured import write_measurement

import dosimeter as dm
from dosimeter.engines.counting.counts import nearest_counts
from dosimeter.engines.counting.regression import regress_counts
from dosimeter.engines.counting.simulation import Simulator
from dosimeter.labels.rlu import RLU
from dosimeter.types import Update

PENALTIES = (0.1, 1.0, 3.0, 10.0, 30.0, 1e9)


def gather(folder: str, simulations: int, clients: int, seed: int) -> tuple[Tensor, ...]:
    """Counts, statistics and whole updates of simulated clients (K, ...), and of private ones (n, ...)."""
    model, training = network(folder, True), dm.FedAvg(learning_rate=0.01, epochs=10, mini_batch=MINI_BATCH, shuffle=True)
    known = {"training": training, "auxiliary": images_of(folder, "test"), "normalization": dm.Normalization(mean=MEAN, std=STD)}
    private = [client(folder, seed + place) for place in range(clients)]
    first = dm.observe(model, private[0][0], seed=seed, **known)
    simulator = Simulator(first, torch.Generator().manual_seed(seed), RLU().probes)
    counts = simulator.draw_counts(simulations)
    shown, whole = [], []
    for one in counts:
        places = simulator._draw_places(one)
        update = training(model, simulator.inputs[places], simulator.labels[places], dm.CrossEntropy())
        shown.append(simulator.statistics(update))
        whole.append(flat(update))
    of_private = [dm.observe(model, batch, seed=seed + place, **known).update for place, (batch, _) in enumerate(private)]
    return (
        counts,
        torch.stack(shown),
        torch.stack(whole),
        torch.stack([wanted for _, wanted in private]),
        torch.stack([simulator.statistics(update) for update in of_private]),
        torch.stack([flat(update) for update in of_private]),
    )


def flat(update: Update) -> Tensor:
    """All layers side by side, each scaled to a norm of one, so that none drowns the others."""
    return torch.cat([change.flatten() / change.norm().clamp_min(1e-30) for change in update.values()])


def share(predicted: Tensor, wanted: Tensor) -> float:
    return sum(right(nearest_counts(one, BATCH), own) for one, own in zip(predicted, wanted)) / len(wanted)


def by_statistics(shown: Tensor, counts: Tensor, asked: Tensor) -> Tensor:
    return torch.stack([regress_counts(shown, counts, one)[0] for one in asked])


def by_every_layer(shown: Tensor, whole: Tensor, counts: Tensor, asked: Tensor, asked_whole: Tensor) -> Tensor:
    """What the statistics predict, and a ridge of what they leave on all entries; the penalty with the least error of leaving one out."""
    left = counts.double() - by_statistics(shown, counts, shown)
    middle = whole.double().mean(0)
    inner = (whole.double() - middle) @ (whole.double() - middle).T  # (K, K)
    outer = (asked_whole.double() - middle) @ (whole.double() - middle).T
    size, eye = float(inner.diagonal().mean()), torch.eye(len(inner), dtype=torch.float64)

    def error(penalty: float) -> float:
        hat = inner @ torch.linalg.inv(inner + penalty * size * eye)
        return float(((left - hat @ left) / (1 - hat.diagonal())[:, None]).square().mean())

    best = min(PENALTIES, key=error)
    return by_statistics(shown, counts, asked) + outer @ torch.linalg.solve(inner + best * size * eye, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--simulations", type=int, default=256)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--seed", type=int, default=2750)
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    counts, shown, whole, wanted, asked, asked_whole = gather(chosen.data, chosen.simulations, chosen.clients, chosen.seed)
    sizes = [size for size in (16, 32, 64, 128, 256, 512) if size <= chosen.simulations]
    rows = [["statistics", size, round(share(by_statistics(shown[:size], counts[:size], asked), wanted), 3)] for size in sizes]
    every = by_every_layer(shown, whole, counts, asked, asked_whole)
    rows.append(["every layer", chosen.simulations, round(share(every, wanted), 3)])
    half = chosen.simulations // 2
    rows.append(["own kind", half, round(share(by_statistics(shown[:half], counts[:half], shown[half:]), counts[half:]), 3)])
    for row in rows:
        print(*row, sep="  ")
    if chosen.record:
        seeds = f"{chosen.seed} to {chosen.seed + chosen.clients - 1}"
        write_measurement(chosen.record, seeds, ["read", "simulated clients", "labels right"], rows, [])


if __name__ == "__main__":
    main()
