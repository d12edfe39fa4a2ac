"""Features behind noise, clipping and compression: RGLA, FGLA's quotient and `subspace` on the same batches, all told the labels.

    python benchmarks/distorted_heads.py run --shard 0 --shards 4 --seconds 400 --seeds 10 --data ../shared/data > shard-0.jsonl
    python benchmarks/distorted_heads.py table shard-*.jsonl

The errors behind rgla's Tables 2 and 12, as in docs/results/defenses.md: noise of .01, clipping to 4, and 80 to 99.9 % of each layer's
entries pruned. A line is printed for each method on each batch, so that a killed run loses nothing; where a method is run again, the last
line counts. The table has the median over the batches of the mean relative feature error and of the mean cosine, the samples' cosine to
their batch's mean beside it, and in how many batches `subspace` is closer than RGLA; what is not finite counts as infinitely far.
`--methods subspace` leaves RGLA's 20,000 steps out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_cases import Case, errors, photographs, trained
from torch.nn.functional import cosine_similarity

import dosimeter as dm
from dosimeter.interfaces import Defense, FeatureRecovery
from dosimeter.types import FeatureEstimate, Refused

METHODS = ("rgla", "quotient", "subspace")
PRUNED = (0.8, 0.9, 0.99, 0.999)
EVERYWHERE = ("noise .01", "99.9% pruned")  # the others on the first setting alone, as RGLA takes ten seconds a batch


def defenses() -> dict[str, Defense]:
    behind: dict[str, Defense] = {"noise .01": dm.defense("gaussian_noise", std=0.01), "clipped to 4": dm.defense("clipping", max_norm=4.0)}
    return behind | {f"{ratio:.1%} pruned": dm.defense("pruning", ratio=ratio) for ratio in PRUNED}


def settings(data: Path) -> dict[str, Callable[..., Case]]:
    """What draws a batch by seed= and defenses=, by name; the cheap ones first."""
    shapes = [("resnet18", 8, 100, True), ("resnet18", 4, 10, True), ("resnet18", 4, 100, True), ("resnet18", 16, 100, True)]
    shapes += [("resnet18", 8, 100, False), ("resnet20", 8, 100, True), ("resnet18", 32, 100, True), ("resnet18", 8, 1000, True)]
    drawn = {
        f"{name} untrained, {'train' if mode else 'eval'}, B={size}, C={classes}": partial(_untrained, data, name, size, classes, mode)
        for name, size, classes, mode in shapes
    }
    drawn |= {
        f"resnet20 trained, {'train' if mode else 'eval'}, B=4, C=10": partial(trained, data, 4, train=mode) for mode in (True, False)
    }
    return drawn


def run(arguments: argparse.Namespace) -> None:
    began, behind = time.perf_counter(), defenses()
    names = [name for name in settings(arguments.data) if any(fnmatch(name, pattern) for pattern in arguments.settings)]
    jobs = [
        (seed, name, under)
        for seed in range(arguments.seeds)
        for name in names
        for under in (behind if name.endswith("B=8, C=100") and name.startswith("resnet18 untrained, train") else EVERYWHERE)
        if fnmatch(under, arguments.behind)
    ]
    for seed, name, under in jobs[arguments.shard :: arguments.shards]:
        case = settings(arguments.data)[name](seed=arguments.seed + seed, defenses=(behind[under],))
        for method in arguments.methods:
            if time.perf_counter() - began > arguments.seconds:
                return
            line = {"setting": name, "behind": under, "seed": arguments.seed + seed, "method": method, "nearest": _to_mean(case)}
            print(json.dumps(line | measured(dm.feature_recovery(method), case, seed)), flush=True)


def measured(method: FeatureRecovery, case: Case, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        found = dm.recover_features(case.exposure, method, labels=case.labels, seed=seed)
    except Refused as refused:
        return {"refused": str(refused)}
    if not bool(torch.isfinite(found.features).all()):
        return {"refused": "features that are not finite"}
    error = errors(found, case)
    return {
        "error": float(error.mean()),
        "worst": float(error.max()),
        "cosine": _cosine(found, case),
        "certified": int(found.certified.sum()),
        "seconds": round(time.perf_counter() - began, 2),
    }


def table(paths: Iterable[Path]) -> None:
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.startswith("{")]
    found = {(line["setting"], line["behind"], line["method"], line["seed"]): line for line in lines}
    for setting in dict.fromkeys(line["setting"] for line in lines):
        print(f"\n{setting}\n\n| behind | batches | rgla | quotient | subspace | subspace closer | cosines | to the mean |\n|{'---|' * 8}")
        for behind in dict.fromkeys(line["behind"] for line in lines if line["setting"] == setting):
            by_method = {m: {key[3]: line for key, line in found.items() if key[:3] == (setting, behind, m)} for m in METHODS}
            both = sorted(by_method["rgla"].keys() & by_method["subspace"].keys())
            by_method = {m: {seed: line for seed, line in found_by_seed.items() if seed in both} for m, found_by_seed in by_method.items()}
            closer = sum(_error(by_method["subspace"][seed]) <= _error(by_method["rgla"][seed]) for seed in both)
            cells = [_median(by_method[m].values(), "error") for m in METHODS]
            cosines = " / ".join(_median(by_method[m].values(), "cosine") for m in METHODS)
            nearest = _median(by_method["subspace"].values(), "nearest")
            print("|", " | ".join([behind, str(len(both)), *cells, f"{closer} of {len(both)}", cosines, nearest]), "|")


def _untrained(data: Path, name: str, size: int, classes: int, train: bool, *, seed: int, **options: Any) -> Case:
    labels = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))[:size]
    return photographs(data, name, labels, classes, seed=seed, train=train, **options)


def _cosine(found: FeatureEstimate, case: Case) -> float:
    """Mean cosine of each sample to the guess for its label; samples of one label are compared in the order of their cosines."""
    values = cosine_similarity(found.features.double()[:, None], case.features[None], dim=2)  # (n, B)
    values = torch.where(found.labels[:, None] == case.labels, values, -torch.inf)
    best = values.amax(0)
    return float(torch.where(torch.isfinite(best), best, 0).mean())


def _to_mean(case: Case) -> float:
    """Mean cosine of the samples to their own mean."""
    return float(cosine_similarity(case.features, case.features.mean(0, keepdim=True)).mean())


def _error(line: dict[str, Any]) -> float:
    return line.get("error", float("inf"))


def _median(lines: Iterable[dict[str, Any]], what: str) -> str:
    values = [line[what] for line in lines if what in line]
    return f"{statistics.median(values):.3g}" if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--shard", type=int, default=0)
    runner.add_argument("--shards", type=int, default=1)
    runner.add_argument("--seconds", type=float, default=400)
    runner.add_argument("--seeds", type=int, default=10)
    runner.add_argument("--seed", type=int, default=0, help="of the first batch")
    runner.add_argument("--settings", nargs="+", default=["*"], help="only those whose names match a pattern, such as '*C=100'")
    runner.add_argument("--behind", default="*", help="only the defenses that match this pattern")
    runner.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    runner.add_argument("--data", type=Path, default=Path("../shared/data"))
    runner.set_defaults(do=run)
    tabulator = commands.add_parser("table")
    tabulator.add_argument("paths", type=Path, nargs="+")
    tabulator.set_defaults(do=lambda arguments: table(arguments.paths))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.do(arguments)


if __name__ == "__main__":
    main()
