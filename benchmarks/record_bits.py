"""Whether a change of the code changes a record: the same six audits before and after, compared bit by bit.

    python benchmarks/record_bits.py make FOLDER [NAME ...]   runs the audits and keeps their records
    python benchmarks/record_bits.py compare OLD NEW          prints what differs; exit code 1 where anything does
    ... compare OLD NEW --without SURFACE ...                 leaves the records of these surfaces out, as where one is new

One thread, so that sums are taken in one order. Seconds, versions, keys and checksums are left out. RENAMED lists the words that a
change of names alone explains: old spelling, new spelling.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFAULT = ""

README = """
seed = 1
[model]
name = "lenet5"
mode = "train"
[data]
name = "photographs"
batch_size = 2
[[defenses]]
name = "clipping"
max_norm = 1.0
"""

FEDAVG = """
seed = 2
declare_batch_size = false
attacks = [{ name = "dlg", steps = 30 }, { name = "inverting_gradients", steps = 60 }]
[model]
name = "fcn3"
epochs = 2
[data]
name = "digits"
batch_size = 6
[training]
name = "fedavg"
steps = 3
learning_rate = 0.05
[[defenses]]
name = "gaussian_noise"
std = 1e-3
"""

GRID = """
seed = 3
batches = 1
attacks = [{ name = "inverting_gradients", steps = 40 }]
[data]
batch_size = 4
[federation]
clients = 2
rounds = 3
"""

SERVER = """
seed = 4
labels = [{ name = "gradfilt", targets = [3, 5] }]
features = []
attacks = [
    { name = "gradfilt", targets = [3], steps = 40 },
    { name = "gradfilt_imprint", targets = [1, 3], expected = 12, bins = 64 },
    { name = "imprint" },
    { name = "trap_weights" },
    { name = "linear_recursion" },
]
[model]
name = "fcn3"
[data]
name = "digits"
batch_size = 12
"""

SOFT = """
seed = 5
attack_labels = "given"
attacks = [{ name = "inverting_gradients", steps = 40, restarts = 2, polish = 20 }, { name = "stepwise", steps = 40 }, { name = "rgla" }]
[model]
name = "convnet"
mode = "train"
[data]
name = "digits"
batch_size = 5
[loss]
name = "cross_entropy"
smoothing = 0.1
[[defenses]]
name = "quantisation"
bits = 8
[[defenses]]
name = "pruning"
ratio = 0.5
"""

AUDITS = {
    "default": (DEFAULT, []),
    "readme": (README, []),
    "fedavg": (FEDAVG, []),
    "grid": (GRID, ["--defenses", "pruning,mixup,dpsgd:max_norm=1:noise_multiplier=0.1,head_withheld,low_rank:rank=1,soteria"]),
    "server": (SERVER, []),
    "soft": (SOFT, []),
}
FILTER = '"targets":[1,3],"bias":1000.0,"scale":1.0,"camouflage":0.0'
RENAMED: tuple[tuple[str, str], ...] = (
    ('"camouflage":0.0,"threshold":8,"round":0,"steps":40,"learning_rate":0.1', '"camouflage":0.0,"steps":40'),
    (
        f'"name":"gradfilt",{FILTER},"threshold":8,"expected":12,"bins":64,"round":0,"steps":4800,"learning_rate":0.1,'
        '"path":"auto","precision":"fp32"',
        f'"name":"gradfilt_imprint",{FILTER},"expected":12,"bins":64,"round":0',
    ),
)
TIMED = ("seconds", "versions", "key", "checksum", "update_seconds", "time_ratio")  # the checksum covers the seconds
TIMES = re.compile(r"[\d.]+ times a client's time")


def make(folder: Path, *names: Path) -> None:
    """The records of every audit, each in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    for name in map(str, names or AUDITS):
        text, options = AUDITS[name]
        config = folder / f"{name}.toml"
        config.write_text(text)
        command = [sys.executable, "-m", "dosimeter", "audit", str(config), "--out", str(folder / name), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        print(f"{name}: exit {done.returncode} {done.stderr.strip()[-300:]}", flush=True)


def compare(old: Path, new: Path, *, without: Sequence[str] = ()) -> int:
    differences = 0
    for name in (name for name in AUDITS if (new / name).exists()):
        before, after = (
            [record for record in records if record["surface"] not in without]
            for records in (_records(old / name, renamed=True), _records(new / name, renamed=False))
        )
        found = [] if len(before) == len(after) else [f"{len(before)} records, now {len(after)}"]
        for one, other in zip(before, after):
            found += [f"{one['surface']} {one['method']}: {line}" for line in _differences(one, other, "")]
        print(f"{name}: {len(before)} records, {len(found)} differences")
        for line in found[:40]:
            print("   ", line)
        differences += len(found)
    return int(differences > 0)


def _records(folder: Path, *, renamed: bool) -> list[dict[str, Any]]:
    text = (folder / "records.jsonl").read_text()
    if renamed:
        for old, new in RENAMED:
            text = text.replace(old, new)
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        if record["surface"] == "inputs":
            record["method"] = record["config"]["attack"]["name"]  # the same words, after RENAMED
    return records


def _differences(old: Any, new: Any, path: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in old | new if key not in TIMED]
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{path}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for i, (a, b) in enumerate(zip(old, new)) for line in _differences(a, b, f"{path}[{i}]")]
    if isinstance(old, str) and isinstance(new, str):
        old, new = TIMES.sub("", old), TIMES.sub("", new)
    return [] if old == new else [f"{path}: {str(old)[:120]} -> {str(new)[:120]}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--without", nargs="+", default=[], metavar="SURFACE")
    options = parser.parse_args()
    sys.exit(make(*options.folders) if options.action == "make" else compare(*options.folders, without=options.without))
