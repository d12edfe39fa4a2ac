"""Time of every label recovery against batch, classes and features, with the growth fitted.

    python benchmarks/labels.py [--quick] [--methods ilrg,llg] [--device cuda] [--json]

The client is a bare ReLU feature layer and a head, so that the recovery is timed and not a network. Growth is the slope
of log time against log size, over the larger half of the sizes. All figures of a run are from the same machine at the same
time; read the ratios, not the seconds. soft_labels.py compares soft_scalar's two searches.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dosimeter as dm
from dosimeter.interfaces import Exposure
from dosimeter.types import Refused

METHODS = (
    "idlg",
    "gradinversion",
    "rlg",
    "llg",
    "llg_plus",
    "llg_star",
    "zlg",
    "ilrg",
    "posterior",
    "gradient_bridge",
    "cv_matching",
    "soft_scalar",
)
SIZES = {
    "batch": (16, 64, 256, 1024),
    "classes": (100, 300, 1000, 3000),
    "features": (64, 256, 1024),
}
QUICK = {"batch": (16, 64), "classes": (100, 300), "features": (64, 256)}
DEFAULT = {"batch": 64, "classes": 1000, "features": 512}
SLOW = {"rlg": {"batch": 16, "classes": 100, "features": 256}}  # one linear program a class
INPUTS = 64


def exposure(batch: int, classes: int, features: int, device: str = "cpu", seed: int = 0) -> Exposure:
    """What a client of these sizes sends, with one auxiliary sample a class (at most 2,000)."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, features), nn.ReLU(), nn.Linear(features, classes)).eval().to(device)
    inputs = torch.rand(batch, INPUTS, generator=rng)
    labels = torch.randint(classes, (batch,), generator=rng)
    kinds = torch.arange(min(classes, 2000))
    auxiliary = dm.Batch(torch.rand(len(kinds), INPUTS, generator=rng).to(device), kinds.to(device))
    return dm.observe(model, dm.Batch(inputs.to(device), labels.to(device)), auxiliary=auxiliary)


def seconds(job: Callable[[], Any], repeats: int = 3) -> float:
    """The least of a few runs after a first one."""
    job()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


def growth(sizes: list[int], times: list[float]) -> float:
    """The exponent a of time ~ size^a by least squares over the larger half of the sizes."""
    half = slice(-max(2, math.ceil(len(sizes) / 2)), None)
    x = torch.tensor(sizes[half], dtype=torch.float64).log()
    y = torch.tensor(times[half], dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def measure(method: str, axis: str, sizes: tuple[int, ...], device: str) -> dict[str, Any]:
    """One method along one axis, the others at their default."""
    base = SLOW.get(method, DEFAULT)
    done, times = [], []
    for size in sizes:
        if method in SLOW and axis != "features" and size > 4 * base[axis]:
            continue
        setting = base | {axis: size}
        if method == "soft_scalar":
            setting["batch"] = 1
        seen = exposure(**setting, device=device)
        try:
            times.append(seconds(lambda seen=seen: dm.recover_labels(seen, method)))
        except Refused:
            continue
        done.append(size)
    fitted = growth(done, times) if len(done) > 1 else None
    return {"method": method, "axis": axis, "sizes": done, "seconds": times, "growth": fitted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated names")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else SIZES
    rows = []
    for method in arguments.methods.split(","):
        for axis in sizes:
            if method == "soft_scalar" and axis == "batch":
                continue
            row = measure(method, axis, sizes[axis], arguments.device)
            rows.append(row)
            if not arguments.json:
                times = "  ".join(f"{size}: {1000 * taken:.1f} ms" for size, taken in zip(row["sizes"], row["seconds"]))
                print(f"{method:16} {axis:9} {times}   growth {row['growth'] if row['growth'] is None else round(row['growth'], 2)}")
    if arguments.json:
        print(json.dumps({"methods": rows}))


if __name__ == "__main__":
    main()
