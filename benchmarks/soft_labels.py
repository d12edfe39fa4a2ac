"""Soft labels of single samples on CIFAR images: how many come back, and soft_scalar's two searches on the same samples.

    python benchmarks/soft_labels.py [--data ../shared/data] [--samples 1000] [--timed 40] [--seed 0] [--json]

Smoothing ε ~ U(0, .5) and mixup λ ~ U(0, 1), with the images' own labels and with random ones, on an untrained LeNet-5 (10 and
100 classes) and on the CIFAR-10 ResNet-20. A label is recovered where its L1 error is below 1e-3. Each row has soft_scalar as it
is, without the bias gradient, and what it says of its answer there (wrong and not marked so: `unsaid`); --certainty adds how many
come back without the bias by the power of ten of the second-largest probability. The first `timed` samples are also solved by the
published search; a ratio is the quotient of total times in one run, each from exposure to estimate, every search going through these
samples by itself. (In turns, sample by sample, the grid finds the processor's caches full of the published search and takes half as
long again: `interleaved_ratio`.)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.interfaces import Exposure
from dosimeter.models.loading import load_model
from dosimeter.network.head import find_head
from dosimeter.normalization import from_pixels
from dosimeter.types import LabelEstimate, Normalization, Outcome

RESNET = "weights/cifar10_resnet20-12fca82f.th"
NORMALIZATION = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SETTINGS = ("lenet-10", "lenet-100", "resnet20-10")
RECOVERED = 1e-3


def network(setting: str, data: Path, seed: int) -> nn.Module:
    name, classes = setting.split("-")
    if name == "resnet20":
        return load_model("resnet20", {"classes": 10}, data / RESNET, seed).eval()
    return load_model("lenet5", {"classes": int(classes)}, None, seed).eval()


def samples(setting: str, family: str, own_labels: bool, count: int, data: Path, seed: int) -> Iterator[tuple[Exposure, Tensor]]:
    """Exposures of one sample each with their soft labels (1, C)."""
    classes = int(setting.split("-")[1])
    arrays = np.load(data / f"cifar{classes}.npz")
    images = from_pixels(torch.from_numpy(arrays["test_images"]).permute(0, 3, 1, 2).float() / 255, NORMALIZATION)
    labels = torch.from_numpy(arrays["test_labels"]).long()
    model, rng = network(setting, data, seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        first = torch.randint(len(images), (), generator=rng)
        others = torch.nonzero(labels != labels[first]).flatten()
        second = others[torch.randint(len(others), (), generator=rng)]
        pair = torch.stack([labels[first], labels[second]]) if own_labels else torch.randperm(classes, generator=rng)[:2]
        one, other = nn.functional.one_hot(pair, classes).float()
        weight = float(torch.rand((), generator=rng))
        if family == "smoothing":
            image, label = images[first], (1 - weight / 2) * one + weight / 2 / classes
        else:
            image, label = weight * images[first] + (1 - weight) * images[second], weight * one + (1 - weight) * other
        yield dm.observe(model, dm.Batch(image[None], label[None]), normalization=NORMALIZATION), label[None]


def timed(exposure: Exposure, **options: Any) -> tuple[LabelEstimate, float]:
    start = time.perf_counter()
    found = dm.recover_labels(exposure, "soft_scalar", **options)
    return found, time.perf_counter() - start


def measure(
    setting: str, family: str, own_labels: bool, count: int, compared: int, data: Path, seed: int, certainty: bool
) -> dict[str, Any]:
    searches: dict[str, dict[str, Any]] = {"grid": {}, "without_bias": {"use_bias": False}, "published": {"search": "published"}}
    recovered: dict[str, list[bool]] = {name: [] for name in searches}
    unsaid = ambiguous = 0
    second = torch.ones(())
    by_certainty: dict[int, list[bool]] = {}
    kept: list[Exposure] = []
    in_turns = {"grid": 0.0, "published": 0.0}
    for index, (exposure, label) in enumerate(samples(setting, family, own_labels, count, data, seed)):
        if index == 0:
            timed(exposure, family=family)  # the first call of all is slower
        if index < compared:
            kept.append(exposure)
        for name, options in searches.items():
            if name == "published" and index >= compared:
                continue
            found, taken = timed(exposure, family=family, **options)
            assert found.soft is not None
            hit = float((found.soft - label).abs().sum()) < RECOVERED
            recovered[name].append(hit)
            if name in in_turns and index < compared:
                in_turns[name] += taken
            if name == "grid":
                second = find_head(exposure).logits(found.details["features"]).softmax(1).topk(2).values[0, 1]
            if name == "without_bias":
                by_certainty.setdefault(math.floor(float(second.log10())), []).append(hit)
                ambiguous += found.outcome is not Outcome.COMPLETED
                unsaid += not hit and found.outcome is Outcome.COMPLETED
    row: dict[str, Any] = {"setting": setting, "family": family, "labels": "own" if own_labels else "random", "samples": count}
    row |= {name: sum(hits) / len(hits) for name, hits in recovered.items() if hits}
    row |= {"ambiguous": ambiguous / count, "unsaid": unsaid / count}
    if certainty:
        row["by_certainty"] = {power: [len(hits), sum(hits) / len(hits)] for power, hits in sorted(by_certainty.items())}
    if kept:
        seconds = {name: sum(timed(exposure, family=family, **options)[1] for exposure in kept) for name, options in searches.items()}
        row |= {f"{name}_seconds": total / compared for name, total in seconds.items()}
        row |= {f"{name}_ratio": seconds["published"] / seconds[name] for name in ("grid", "without_bias")}
        row["interleaved_ratio"] = in_turns["published"] / in_turns["grid"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--timed", type=int, default=40, help="samples that the published search solves too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--families", default="smoothing,mixup")
    parser.add_argument("--labels", default="own,random")
    parser.add_argument("--certainty", action="store_true", help="recovered without the bias, by the second-largest probability")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for setting in arguments.settings.split(","):
        for family in arguments.families.split(","):
            for labels in arguments.labels.split(","):
                counts = (arguments.samples, arguments.timed)
                row = measure(setting, family, labels == "own", *counts, arguments.data, arguments.seed, arguments.certainty)
                shown = "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items())
                print(json.dumps(row) if arguments.json else shown, flush=True)


if __name__ == "__main__":
    main()
