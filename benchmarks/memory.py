"""The peak memory of single methods against classes, batch and parameters, each point in a process of its own.

    python benchmarks/memory.py --jobs 2 --out memory.json
    python benchmarks/memory.py --most-classes 21000

Prints the peak beyond what the process holds before the method runs, and the exponent of its growth along each axis.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LABEL_METHODS = ("subspace", "llg_star", "ilrg", "posterior")
ATTACK = "inverting_gradients"
AXES = {"classes": (1000, 2000, 4000, 10_000, 21_000), "batch": (4, 8, 16), "width": (128, 256, 512)}
MOST_CLASSES = 4000  # by default, which takes minutes on one core
USUAL = {"classes": 100, "batch": 8, "width": 64}


def measure(method: str, classes: int, batch: int, width: int, seed: int) -> dict[str, Any]:
    """The peak of one method in this process."""
    import torch
    from torch import nn

    import dosimeter as dm

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, width), nn.ReLU(), nn.Linear(width, classes)
    )
    truth, other = (dm.Batch(torch.rand(n, 3, 16, 16), torch.randint(0, classes, (n,))) for n in (batch, 64))
    exposure = dm.observe(model.eval(), truth, auxiliary=other)
    before = _field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
    try:
        if method == ATTACK:
            dm.reconstruct(exposure, method, labels=truth.targets, steps=3)
        else:
            dm.recover_labels(exposure, method)
        refused = ""
    except dm.Refused as error:
        refused = str(error)
    return {"bytes": max(1, _field("VmHWM") - before), "parameters": sum(p.numel() for p in model.parameters()), "refused": refused}


def _field(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of log y against log x by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    centre = tuple(sum(column) / len(logs) for column in zip(*logs))
    return sum((x - centre[0]) * (y - centre[1]) for x, y in logs) / sum((x - centre[0]) ** 2 for x, _ in logs)


def _in_process(method: str, point: dict[str, int], seed: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--seed", str(seed), "--point", json.dumps({"method": method, **point})]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"bytes": 1, "parameters": 1, "refused": done.stderr[-200:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[*LABEL_METHODS, ATTACK])
    parser.add_argument("--most-classes", type=int, default=MOST_CLASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        sys.stdout.write(json.dumps(measure(**json.loads(options.point), seed=options.seed)))
        return
    points = [
        (method, axis, value)
        for method in options.methods
        for axis, values in AXES.items()
        for value in values
        if axis != "classes" or value <= options.most_classes
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda p: _in_process(p[0], USUAL | {p[1]: p[2]}, options.seed), points))
    rows = [{"method": m, "axis": a, "value": v, **result} for (m, a, v), result in zip(points, found)]
    for method in options.methods:
        for axis in AXES:
            own = [row for row in rows if row["method"] == method and row["axis"] == axis and not row["refused"]]
            if len(own) < 2:
                sys.stdout.write(f"{method:20} {axis:8} not measured\n")
                continue
            known = [(row["parameters"] if axis == "width" else row["value"], row["bytes"]) for row in own]
            peaks = ", ".join(f"{value}: {peak / 1e6:.0f} MB" for value, peak in known)
            name = "parameters" if axis == "width" else axis
            sys.stdout.write(f"{method:20} {name:10} exponent {exponent(known):5.2f}  ({peaks})\n")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
