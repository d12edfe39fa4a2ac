"""The peak memory of methods against classes, batch and parameters, and of a whole audit; each point in a process of its own.

    python benchmarks/memory.py --jobs 2 --out memory.json
    python benchmarks/memory.py --audit classes --most-classes 21000
    python benchmarks/memory.py --audit resnet50 --seconds 600

A point is the peak beyond what the process holds when the method begins. The method has run once before on a small model, so that what
libraries load and keep is not counted. The floor, which is the point of that small model itself, is subtracted. The exponent is the
slope of log(peak − floor) against log(size) by least squares, and its residual is how far a point lies from the line. Points less than
twice the floor are left out of the line. `audit` stands for all label recoveries and `subspace` with their scores, as an audit runs them.
`--audit resnet50` runs a whole quick audit of ResNet-50 with 1,000 classes, 224 pixels, a batch of 4 and 64 auxiliary images, all drawn,
and prints the peak of the process. `--audit classes` does the same for the small network of the points, with the most classes and a
batch of 8.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LABEL_METHODS = ("subspace", "llg_star", "ilrg", "posterior")
ATTACK, AUDIT = "inverting_gradients", "audit"
SMALL = {"classes": 10, "batch": 2, "width": 16}
AXES = {  # sizes, and what the other axes stand at
    "classes": ((1000, 2000, 4000, 8000, 16_000, 21_000), {"batch": 8, "width": 256}),
    "batch": ((32, 64, 128, 256), {"classes": 1000, "width": 512}),
    "width": ((512, 1024, 2048, 4096), {"classes": 100, "batch": 8}),
}
SECONDS = 300  # of one point
MOST_CLASSES = 8000  # by default, which takes minutes on one core
SIDE, CHANNELS = 16, 8
COLUMNS = ("method", "axis", "sizes", "peaks [MB]", "floor [MB]", "exponent ± residual", "process at the largest [GB]")


def measure(method: str, classes: int, batch: int, width: int, seed: int) -> dict[str, Any]:
    """The peak of one method in this process, beyond what it holds after the method has run on a small model."""
    import torch

    torch.set_num_threads(1)
    _run(method, **SMALL, seed=seed)
    return _run(method, classes, batch, width, seed)


def _small_model(classes: int, width: int, seed: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    flat = CHANNELS * SIDE * SIDE
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(flat, width), nn.ReLU(), nn.Linear(width, classes)
    ).eval()


def _run(method: str, classes: int, batch: int, width: int, seed: int) -> dict[str, Any]:
    import torch

    import dosimeter as dm
    from dosimeter.surfaces.surface import surfaces

    model = _small_model(classes, width, seed)
    truth, other = (dm.Batch(torch.rand(n, 3, SIDE, SIDE), torch.randint(0, classes, (n,))) for n in (batch, 64))
    exposure = dm.observe(model, truth, auxiliary=other)
    before = _field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
    refused = ""
    try:
        if method == AUDIT:
            nothing: dict[str, Any] = {surface.plural: [] for surface in surfaces() if surface.plural not in ("labels", "features")}
            records = dm.audit(model, truth, auxiliary=other, features="subspace", progress=None, **nothing).records
            refused = "; ".join(f"{record.method} crashed" for record in records if record.outcome == "crashed")
        elif method == ATTACK:
            dm.reconstruct(exposure, method, labels=truth.targets, steps=3)
        else:
            dm.recover_labels(exposure, method)
    except dm.Refused as error:
        refused = str(error)
    peak = _field("VmHWM")
    return {
        "bytes": max(1, peak - before),
        "whole": peak,
        "parameters": sum(p.numel() for p in model.parameters()),
        "refused": refused,
    }


def _field(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def exponent(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The slope of log y against log x by least squares, and the root mean square of what the line leaves, as a share of y."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    centre = tuple(sum(column) / len(logs) for column in zip(*logs))
    slope = sum((x - centre[0]) * (y - centre[1]) for x, y in logs) / sum((x - centre[0]) ** 2 for x, _ in logs)
    left = [y - centre[1] - slope * (x - centre[0]) for x, y in logs]
    return slope, math.expm1(math.sqrt(sum(part**2 for part in left) / len(left)))


def _in_process(method: str, point: dict[str, int], seed: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--seed", str(seed), "--point", json.dumps({"method": method, **point})]
    trimmed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed goes back at once
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | trimmed, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"bytes": 1, "whole": 1, "parameters": 1, "refused": f"did not end in {SECONDS} s"}
    return json.loads(done.stdout) if done.returncode == 0 else {"bytes": 1, "whole": 1, "parameters": 1, "refused": done.stderr[-200:]}


def describe_axis(method: str, axis: str, rows: list[dict[str, Any]], floor: int) -> dict[str, Any]:
    """The exponent along one axis with its residual, the points, and the peak of the whole process at the largest."""
    name = "parameters" if axis == "width" else axis
    own = [row for row in rows if row["method"] == method and row["axis"] == axis and not row["refused"]]
    points = [(row["parameters"] if axis == "width" else row["value"], row["bytes"]) for row in own]
    fitted = [(value, peak - floor) for value, peak in points if peak > 2 * floor]
    slope, residual = exponent(fitted) if len(fitted) > 2 else (None, None)
    largest = {"largest": points[-1][0], "peak_mb": points[-1][1] / 1e6, "process_gb": own[-1]["whole"] / 1e9} if own else {}
    return {"method": method, "axis": name, "exponent": slope, "residual": residual, "fitted": len(fitted), "points": points, **largest}


def whole_audit(which: str, classes: int, seconds: float | None, seed: int) -> dict[str, Any]:
    """A whole quick audit in this process: its peak, its seconds, and what became of each method."""
    import torch

    import dosimeter as dm
    from dosimeter.models.loading import load_model
    from dosimeter.randomness import generator
    from dosimeter.surfaces.stand_ins import draw_stand_ins
    from dosimeter.surfaces.surface import surfaces

    if importlib.util.find_spec("PIL") is None:
        for surface in surfaces():
            type(surface).evidence = lambda *_: []
    if which == "resnet50":
        model = load_model("resnet50", {"stem": "imagenet", "classes": 1000, "channels": 3}, None, seed).eval()
        side, size, classes = 224, 4, 1000
    else:
        side, size, model = SIDE, 8, _small_model(classes, 256, seed)
    rng = generator(seed, "memory benchmark")
    images = draw_stand_ins((3, side, side), 2 * size + 64, rng)
    labels = torch.randint(0, classes, (len(images),), generator=rng)
    batch, foreign, auxiliary = (dm.Batch(x, y) for x, y in zip(images.split([size, size, 64]), labels.split([size, size, 64])))
    limit: dict[str, Any] = {} if seconds is None else {"max_seconds": seconds}
    began, spent = time.monotonic(), time.process_time()
    records = dm.audit(model, batch, foreign=foreign, auxiliary=auxiliary, progress=_log(began), seed=seed, **limit).records
    taken = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - spent}
    names = ("surface", "method", "outcome", "verdict", "seconds", "reason")
    methods = [{name: getattr(record, name) for name in names} for record in records]
    return {"peak": _field("VmHWM"), **taken, "threads": torch.get_num_threads(), "methods": methods}


def _print_audit(result: dict[str, Any], seed: int, record: Path | None) -> None:
    for method in result["methods"]:
        said = "{surface:10} {method:22} {seconds:8.1f} s  {outcome:14} {verdict}".format(**method)
        sys.stdout.write(f"{said}  {method['reason'][:90]}\n")
    spent = f"{result['seconds']:.0f} s, {result['cpu_seconds']:.0f} s of CPU on {result['threads']} threads"
    total = f"{len(result['methods'])} records, {spent}, peak {result['peak'] / 1e9:.2f} GB"
    sys.stdout.write(f"{total}\n")
    if record:
        from measured import write_measurement

        rows = [[method["surface"], method["method"], round(method["seconds"], 1), method["verdict"]] for method in result["methods"]]
        left_out = [f"{method['reason']}." for method in result["methods"] if "left out" in method["reason"]]
        write_measurement(record, str(seed), ["surface", "method", "time [s]", "verdict"], rows, [f"{total}.", *left_out])


def _log(began: float) -> Callable[[Any], None]:
    """Prints a line where a method begins: the seconds so far, its name, and the peak so far."""
    seen: set[tuple[int, str]] = set()

    def show(where: Any) -> None:
        if (where.position, where.method) not in seen:
            seen.add((where.position, where.method))
            sys.stderr.write(f"{time.monotonic() - began:7.0f} s  {where.method:22} peak so far {_field('VmHWM') / 1e9:.2f} GB\n")
            sys.stderr.flush()

    return show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[*LABEL_METHODS, AUDIT, ATTACK])
    parser.add_argument("--axes", nargs="*", default=list(AXES))
    parser.add_argument("--most-classes", type=int, default=MOST_CLASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--audit", choices=("resnet50", "classes"), help="run a whole quick audit instead")
    parser.add_argument("--seconds", type=float, help="limit of that audit's time (default: none)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path, help="where docs/results finds the table")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        sys.stdout.write(json.dumps(measure(**json.loads(options.point), seed=options.seed)))
        return
    if options.audit:
        result: Any = whole_audit(options.audit, options.most_classes, options.seconds, options.seed)
        _print_audit(result, options.seed, options.record)
    else:
        result = fit_all(options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2))


def _row(method: str, axis: str, value: int, seed: int) -> dict[str, Any]:
    row = {"method": method, "axis": axis, "value": value, **_in_process(method, AXES[axis][1] | {axis: value}, seed)}
    said = row["refused"] or f"{row['bytes'] / 1e6:.0f} MB, the process {row['whole'] / 1e9:.2f} GB"
    sys.stdout.write(f"{method:20} {axis:8} {value:6}  {said}\n")
    sys.stdout.flush()
    return row


def fit_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    points = [
        (method, axis, value)
        for method in options.methods
        for axis in options.axes
        for value in AXES[axis][0]
        if (axis == "classes" and value <= options.most_classes) or (axis != "classes" and method != AUDIT)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        floors = dict(zip(options.methods, pool.map(lambda method: _in_process(method, SMALL, options.seed)["bytes"], options.methods)))
        rows = list(pool.map(lambda p: _row(p[0], p[1], p[2], options.seed), points))
    fits = [describe_axis(method, axis, rows, floors[method]) for method in options.methods for axis in options.axes]
    fits = [fit for fit in fits if fit["points"]]
    for fit in fits:
        peaks = ", ".join(f"{value}: {peak / 1e6:.0f} MB" for value, peak in fit["points"])
        slope = f"{fit['exponent']:5.2f} ± {fit['residual']:4.0%}" if fit["exponent"] is not None else "below its floor"
        said = f"{fit['method']:20} {fit['axis']:10} exponent {slope}, floor {floors[fit['method']] / 1e6:.0f} MB"
        sys.stdout.write(f"{said} ({peaks}); process {fit.get('process_gb', 0):.2f} GB\n")
    if options.record:
        from measured import write_measurement

        unmeasured = [f"{row['method']} at {row['axis']} = {row['value']}: {row['refused']}." for row in rows if row["refused"]]
        write_measurement(options.record, str(options.seed), COLUMNS, [_table_row(fit, floors) for fit in fits], unmeasured)
    return fits


def _table_row(fit: dict[str, Any], floors: dict[str, int]) -> list[Any]:
    slope = "below its floor" if fit["exponent"] is None else f"{fit['exponent']:.2f} ± {fit['residual']:.0%}"
    peaks = " / ".join(f"{peak / 1e6:.0f}" for _, peak in fit["points"])
    sizes = " / ".join(f"{value:,}" for value, _ in fit["points"])
    return [fit["method"], fit["axis"], sizes, peaks, round(floors[fit["method"]] / 1e6), slope, f"{fit['process_gb']:.2f}"]


if __name__ == "__main__":
    main()
