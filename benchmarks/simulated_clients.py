"""Simulated clients side by side and one by one: processor seconds of each, and the largest difference between their updates.

    python benchmarks/simulated_clients.py [--models lenet5 convnet resnet20] [--clients 32] [--epochs 10] [--record FILE.json]

Each client has 32 random images of CIFAR-10's size, in shuffled mini-batches of 8; SGD with learning rate 0.01, eval mode, one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from measured import write_measurement

import dosimeter as dm
from dosimeter.client import together
from dosimeter.models.loading import load_model
from dosimeter.types import Update

SAMPLES, BATCH, MINI_BATCH = 200, 32, 8


def timed(name: str, clients: int, epochs: int, stack_bytes: int) -> tuple[float, Update]:
    rng = torch.Generator().manual_seed(0)
    samples = dm.Batch(torch.rand(SAMPLES, 3, 32, 32, generator=rng), torch.arange(SAMPLES) % 10)
    chosen = torch.randint(SAMPLES, (clients, BATCH), generator=rng)
    model = load_model(name, {"classes": 10, "channels": 3, "size": 32}, None, seed=0).eval()
    training = dm.FedAvg(learning_rate=0.01, epochs=epochs, mini_batch=MINI_BATCH, shuffle=True)
    together.STACK_BYTES = stack_bytes
    began = time.process_time()
    stacks = list(together.train_each(training, model, samples, chosen, dm.CrossEntropy(), range(clients)))
    seconds = time.process_time() - began
    return seconds, {key: torch.cat([stack[key] for stack in stacks]) for key in stacks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet5"])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows, stack_bytes = [], together.STACK_BYTES
    for name in chosen.models:
        timed(name, 2, 1, 0)  # what is imported and built once
        alone, apart = timed(name, chosen.clients, chosen.epochs, 0)
        stacked, joint = timed(name, chosen.clients, chosen.epochs, stack_bytes)
        difference = max(float((joint[key] - apart[key]).abs().max() / apart[key].abs().max()) for key in apart)
        rows.append(
            [name, chosen.clients, chosen.epochs, round(alone, 2), round(stacked, 2), round(alone / stacked, 1), f"{difference:.0e}"]
        )
        print(*rows[-1], sep="  ", flush=True)
    if chosen.record:
        columns = ["model", "clients", "epochs", "one by one [CPU s]", "side by side [CPU s]", "ratio", "largest difference"]
        write_measurement(chosen.record, "0", columns, rows, [])


if __name__ == "__main__":
    main()
