"""Whether a sweep of 200 experiments survives its workers and its driver, on local processes and on Ray, and how long it takes.

    python benchmarks/sweep_kills.py --record out/sweeps.json

Each engine runs the sweep twice with two workers: undisturbed, and with kills. One worker is killed with SIGKILL in the middle, later
the driver, and the same command finishes the sweep. All records must be there, none twice, with the values of the undisturbed processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured import write_measurement

from dosimeter.records import read_cells

SWEEP = """
data = ["digits"]
batch_sizes = [1, 2, 3, 4, 5]
defenses = [[], [{{ name = "gaussian_noise", std = 0.01 }}]]
seeds = [{seeds}]
labels = ["idlg", "ilrg"]
features = ["subspace"]
attacks = [{{ name = "inverting_gradients", steps = 2 }}]
"""
EXPERIMENTS, KILL_WORKER_AT, KILL_DRIVER_AT = 200, 60, 130
ENGINES = {"processes": [], "Ray": ["--on", "ray"]}
WORKERS = {"processes": "multiprocessing.spawn", "Ray": "ray::work_alone"}  # in the command lines of workers


def values(folder: Path) -> dict[str, Any]:
    return {place: (r.key, r.metrics, r.nulls, r.verdict, r.outcome) for place, r in read_cells(folder).items()}


def sweep(command: list[str], engine: str, folder: Path, kills: bool) -> float:
    """The seconds of a whole sweep, the kills and the second command included."""
    began = time.monotonic()
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if kills:
        wait_for(folder, KILL_WORKER_AT, driver)
        os.kill(worker_of(driver.pid, WORKERS[engine]), signal.SIGKILL)
        wait_for(folder, KILL_DRIVER_AT, driver)
        driver.kill()
        driver.wait()
        left = EXPERIMENTS - len(list((folder / "cells").glob("*.json")))
        assert left > 0, "the sweep was done before its driver was killed"
        driver = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert driver.wait() == 0
    return time.monotonic() - began


def wait_for(folder: Path, records: int, driver: subprocess.Popen[bytes]) -> None:
    while len(list((folder / "cells").glob("*.json"))) < records:
        assert driver.poll() is None, "the sweep ended by itself"
        time.sleep(0.05)


def worker_of(driver: int, words: str) -> int:
    """A worker among the descendants of the driver."""
    parents, lines = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue

    def descends(one: int) -> bool:
        return one == driver or (one in parents and descends(parents[one]))

    return next(one for one, line in lines.items() if words in line and one != driver and descends(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first of five")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--place", type=Path, help="keeps the folders, so that a benchmark that is cut goes on with the next sweep")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        rows = run_sweeps(place, options.engines, options.seed)
    if options.record:
        seeds = f"{options.seed} to {options.seed + 4}"
        columns = ["two workers on", "killed", "records", "distinct", "other values than the first row's", "time [s]"]
        write_measurement(options.record, seeds, columns, rows, [])


def run_sweeps(place: Path, engines: list[str], seed: int) -> list[list[Any]]:
    """A row a sweep. Those in the place's `rows.jsonl` are done; what is left of a sweep that was cut is begun anew."""
    file, done = place / "sweep.toml", place / "rows.jsonl"
    file.write_text(SWEEP.format(seeds=", ".join(str(seed + k) for k in range(5))), encoding="utf-8")
    rows = [json.loads(line) for line in done.read_text(encoding="utf-8").splitlines()] if done.exists() else []
    first = None
    for kills in (False, True):
        for engine in engines:
            folder, kind = place / f"{engine} {kills}", "a worker and the driver" if kills else "nobody"
            known, seconds = next((row for row in rows if row[:2] == [engine, kind]), None), 0.0
            if known is None:
                shutil.rmtree(folder, ignore_errors=True)
                command = [sys.executable, "-m", "dosimeter", "sweep", str(file), "--out", str(folder), "--workers", "2", *ENGINES[engine]]
                seconds = sweep(command, engine, folder, kills)
            found = values(folder)
            first = first or found
            if known is None:
                differing = sum(found.get(cell) != value for cell, value in first.items())
                rows.append([engine, kind, len(found), len({key for key, *_ in found.values()}), differing, round(seconds, 1)])
                with done.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.write("{}, killed: {}: {} records, {} distinct, {} differ, {} s\n".format(*(known or rows[-1])))
            sys.stdout.flush()
    return rows


if __name__ == "__main__":
    main()
