"""How exact activation maps are, and how long they take, as the batch, the channels and the grid grow.

    python benchmarks/maps.py [--seed 0] [--draws 2] [--out maps.json]

One convolutional net of 3 by 3 kernels on random images; one of batch size, channels and side of the grid grows, the others stay.
Prints a table, and the exponent of each growth by least squares of logarithms. What is certified wrongly is counted by
`python benchmarks/certificates.py --only maps: --jobs 16`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.probing import input_of

BATCH_SIZES, CHANNELS, SIDES = (2, 4, 8, 16, 28), (72, 144, 288, 512), (2, 3, 5, 7)
GROWTHS = {
    "batch size": [(batch, 512, 4) for batch in BATCH_SIZES],
    "channels": [(4, channels, 4) for channels in CHANNELS],
    "positions": [(4, 512, side) for side in SIDES],
}


def measure(samples: int, channels: int, side: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).eval()
    batch = dm.Batch(torch.rand(samples, 3, 2 * side, 2 * side), torch.randint(0, 10, (samples,)))
    exposure = dm.observe(model, batch)
    start = time.perf_counter()
    found = dm.recover_maps(exposure, layer="2", seed=seed)
    seconds = time.perf_counter() - start
    truth = input_of(model, "2", batch.inputs).double().flatten(1)
    distance, partner = torch.cdist(found.maps.flatten(1), truth).min(1)
    error = float((distance / truth.norm(dim=1)[partner]).max())
    return {"seconds": seconds, "error": error, "bar": float(found.error_bars.max()), "certified": float(found.certified.sum())}


def exponent(sizes: list[float], values: list[float]) -> float:
    """Of the power law that fits best."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=2, help="of each size")
    parser.add_argument("--out", type=Path, help="the table as JSON")
    options = parser.parse_args()
    measure(2, 72, 2, options.seed)  # the first call imports and warms up
    table: dict[str, Any] = {}
    print("| growth | B | C | H = W | certified | largest error | largest bar | median s |\n|---|---|---|---|---|---|---|---|")
    for growth, sizes in GROWTHS.items():
        rows = []
        for samples, channels, side in sizes:
            draws = [measure(samples, channels, side, options.seed + draw) for draw in range(options.draws)]
            seconds, error, bar = (statistics.median(one[key] for one in draws) for key in ("seconds", "error", "bar"))
            certified = int(sum(one["certified"] for one in draws))
            size = {"batch size": samples, "channels": channels, "positions": side**2}[growth]
            rows.append(
                {"B": samples, "C": channels, "side": side, "size": size, "seconds": seconds, "error": error, "certified": certified}
            )
            of = samples * options.draws
            print(
                f"| {growth} | {samples} | {channels} | {side} | {certified} of {of} | {error:.1e} | {bar:.1e} | {seconds:.2f} |",
                flush=True,
            )
        grown = [float(row["size"]) for row in rows]
        laws = {key: exponent(grown, [row[key] for row in rows]) for key in ("seconds", "error")}
        print(f"{growth}: seconds grow with power {laws['seconds']:.1f}, errors with power {laws['error']:.1f}")
        table[growth] = {"rows": rows, "powers": laws}
    if options.out:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
