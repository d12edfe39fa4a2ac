"""Soteria's scores by the paper's backward pass a feature and by random directions: time over a client's own step, and the columns chosen.

    python benchmarks/soteria.py

Each model is untrained and sees a batch of 8 random images; of its features the 40 % with the largest scores are chosen. Times are the
least of three, in one process and one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import dosimeter as dm
from dosimeter.defenses.soteria import feature_scores
from dosimeter.models.loading import load_model
from dosimeter.network.head import locate_head

MODELS = (("lenet5", {"activation": "relu"}, True), ("lenet5", {}, True), ("resnet20", {}, False), ("resnet20", {}, True))
PROBES = (4, 8, 16, 32)
SHARE = 0.4
SEEDS = 5


def main() -> None:
    torch.set_num_threads(1)
    print(f"| model | features | exact | {' | '.join(f'{count} probes' for count in PROBES)} |\n|{'---|' * (3 + len(PROBES))}")
    for name, options, train in MODELS:
        model = load_model(name, {"classes": 10, **options}, None, 0).train(train)
        inputs = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        head, _ = locate_head(model, (3, 32, 32), True)
        batch = dm.Batch(inputs, torch.arange(8))
        step = seconds(lambda model=model, batch=batch: dm.observe(model, batch))
        exact = feature_scores(model, head, inputs)
        cells = [f"{seconds(lambda model=model, head=head, inputs=inputs: feature_scores(model, head, inputs)) / step:.1f} ×"]
        for count in PROBES:
            rough = [feature_scores(model, head, inputs, count, torch.Generator().manual_seed(seed)) for seed in range(SEEDS)]
            took = seconds(lambda m=model, h=head, x=inputs, n=count: feature_scores(m, h, x, n, torch.Generator().manual_seed(0)))
            cells.append(f"{took / step:.1f} ×, {statistics.mean(same(exact, scores) for scores in rough):.0%}")
        words = ", ".join([name, *map(str, options.values()), "train" if train else "eval"])
        print(f"| {words} | {len(exact)} | {' | '.join(cells)} |", flush=True)


def same(exact: torch.Tensor, rough: torch.Tensor) -> float:
    """The share of the exact choice that is also the rough one."""
    count = int(SHARE * len(exact))
    chosen = [set(scores.topk(count).indices.tolist()) for scores in (exact, rough)]
    return len(chosen[0] & chosen[1]) / count


def seconds(action: Callable[[], object]) -> float:
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    main()
