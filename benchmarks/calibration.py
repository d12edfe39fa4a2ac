"""How often an audit says "leaked" of an update that carries nothing of the private batch, and of one that does.

    python benchmarks/calibration.py [--draws 1000] [--power 240] [--seed 0] [--jobs 16] [--seconds 540] [--data shared/data]
        [--out part-1.json] [--record calibration.json]
    python benchmarks/calibration.py --merge part-1.json part-2.json --record calibration.json

The server gets, in place of the private batch's update: that of other images with random labels; that of other images with the
same labels, where only inputs are judged; or noise with the norm of each layer of a foreign update. Images of CIFAR-10, CIFAR-100
and SVHN, and of a narrow kind: one image under faint noise (`--sets` takes some of these). Three untrained nets; batches of 1, 4, 16
and 32; with 64 auxiliary images and without any. The second half of the table has audits of true updates. A label that is proved of
the wrong update can be right by coincidence: the last column counts the audits in which nothing else leaked. No audit begins after
`--seconds`; one that has begun is finished. Parts with other seeds are merged.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import command_line, write_measurement
from scipy.stats import beta
from torch import Tensor

import dosimeter as dm
import dosimeter.runs.exposures
from dosimeter.registry import MODELS
from dosimeter.surfaces.inputs import Inputs

DATASETS = ("cifar10", "cifar100", "svhn", "alike")
ALIKE = 0.05  # deviation of the noise by which images of the narrow kind differ
ALIKE_IMAGES = 2000
NETS = ("small_cnn", "fcn3", "resnet20")
BATCH_SIZES = (1, 4, 16, 32)
AUXILIARY = 64
EMPTY_UPDATES = ("random labels", "same labels", "noise")  # what the server gets in place of the private batch's update
SURFACES = ("labels", "features", "maps", "inputs")


@dataclass(frozen=True)
class Case:
    """One audit: which update the server gets, and the setting."""

    seed: int
    update: str
    data: str
    net: str
    batch_size: int
    auxiliary: int


@dataclass
class Result:
    """What an audit said, with the reasons of the surfaces that leaked."""

    case: Case
    leaked: dict[str, str] = field(default_factory=dict)  # surface -> method: reason
    proved: bool = False  # labels alone leaked, by a certificate that the truth confirms
    crashed: list[str] = field(default_factory=list)
    missing_nulls: int = 0  # records of features or inputs with scores but without a foreign null
    records: int = 0
    seconds: float = 0.0


def cases(count: int, seed: int, updates: tuple[str, ...], sets: Sequence[str] = DATASETS) -> Iterator[Case]:
    """Every combination in turn, in an order that mixes them."""
    grid = [(u, d, n, b, a) for u in updates for d in sets for n in NETS for b in BATCH_SIZES for a in (AUXILIARY, 0)]
    order = np.random.default_rng(seed).permutation(len(grid))
    for i in range(count):
        yield Case(seed * 1_000_000 + i, *grid[order[i % len(grid)]])


def tasks(draws: int, power: int, seed: int, sets: Sequence[str] = DATASETS) -> list[Case]:
    """Audits of empty and of true updates, mixed evenly: a campaign that is cut short has its share of both."""
    empty, true = list(cases(draws, seed, EMPTY_UPDATES, sets)), list(cases(power, seed + 1, ("true",), sets))
    placed = [(place / len(group), case) for group in (empty, true) for place, case in enumerate(group)]
    return [case for _, case in sorted(placed, key=lambda one: one[0])]


def carry_out_in_time(end: float, case: Case, folder: Path, steps: int) -> Result | None:
    """The audit, unless the campaign's time is over; `end` is a time of the machine's clock."""
    return carry_out(case, folder, steps) if time.time() < end else None


def stored(file: Path) -> tuple[list[Result], list[dict[str, str]]]:
    """The results of a part, and the command and seeds that gave them."""
    part = json.loads(file.read_text(encoding="utf-8"))
    return [Result(**result | {"case": Case(**result["case"])}) for result in part["results"]], part["runs"]


def carry_out(case: Case, folder: Path, steps: int) -> Result:
    """One audit of one case."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    rng = torch.Generator().manual_seed(case.seed)
    images, labels = load(folder, case.data)
    classes = int(labels.max()) + 1
    order = torch.randperm(len(images), generator=rng)
    size = case.batch_size

    def batch(indices: Tensor) -> dm.Batch:
        return dm.Batch(images[indices], labels[indices])

    private, other = batch(order[:size]), batch(order[size : 2 * size])
    auxiliary = batch(order[2 * size : 2 * size + case.auxiliary]) if case.auxiliary else None
    if case.update == "same labels":  # other images of the private classes, as far as there are
        rest = order[2 * size + case.auxiliary :]
        chosen: list[Tensor] = []
        for label in private.targets:
            alike = [i for i in rest[labels[rest] == label] if not any(torch.equal(i, j) for j in chosen)]
            chosen.append(alike[0] if alike else rest[len(chosen)])
        other = dm.Batch(images[torch.stack(chosen)], private.targets.clone())
    elif case.update == "random labels":
        other = dm.Batch(other.inputs, torch.randint(classes, (size,), generator=rng))
    torch.manual_seed(case.seed)
    model = MODELS.build(case.net, classes=classes)
    inputs_only = case.update == "same labels"
    with substituted(case.update, private, other, rng):
        report = dm.audit(
            model.eval(),
            private,
            auxiliary=auxiliary,
            labels=[] if inputs_only else "all",
            features=[] if inputs_only else ["subspace", "quotient", "scalar"],
            attacks=["linear_recursion", dm.attack("inverting_gradients", steps=steps)],
            attack_labels="given" if inputs_only else "recovered",
            seed=case.seed % 1000,
        )
    result = Result(case)
    for verdict in report.verdicts:
        if verdict.verdict == "leaked" and verdict.surface in SURFACES:
            result.leaked[verdict.surface] = f"{verdict.method}: {verdict.reason}"
    result.proved = list(result.leaked) == ["labels"] and "proved" in result.leaked["labels"]
    result.crashed = [f"{record.method}: {record.reason}" for record in report.records if record.outcome == "crashed"]
    scored = [record for record in report.records if record.surface in ("features", "inputs") and record.metrics]
    result.missing_nulls = sum("foreign" not in record.nulls and not record.details.get("spared_nulls") for record in scored)
    result.records, result.seconds = len(report.records), time.perf_counter() - started
    return result


_LOADED: dict[str, tuple[Tensor, Tensor]] = {}


def load(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) in [0, 1] and their labels (N,)."""
    if name == "alike" and name not in _LOADED:
        picture, rng = load(folder, "cifar10")[0][:1], torch.Generator().manual_seed(0)
        noise = ALIKE * torch.randn(ALIKE_IMAGES, *picture.shape[1:], generator=rng)
        _LOADED[name] = (picture + noise).clamp(0, 1), torch.randint(10, (ALIKE_IMAGES,), generator=rng)
    if name not in _LOADED:
        with np.load(folder / f"{name}.npz") as stored:
            images = np.concatenate([stored["train_images"], stored["test_images"]])
            labels = np.concatenate([stored["train_labels"], stored["test_labels"]])
        _LOADED[name] = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels.astype(np.int64))
    return _LOADED[name]


@contextmanager
def substituted(update: str, private: dm.Batch, other: dm.Batch, rng: torch.Generator) -> Iterator[None]:
    """Let the server get another update than the private batch's, unless `update` is "true"."""
    module: Any = dosimeter.runs.exposures
    honest: Callable[..., Any] = module.expose
    noise: dict[str, Tensor] = {}

    def expose(client: Any, protocol: Any, batch: dm.Batch) -> Any:
        if update == "true" or not torch.equal(batch.inputs, private.inputs):
            return honest(client, protocol, batch)
        exposure = honest(client, protocol, other)
        if update != "noise":
            return exposure
        for name, change in exposure.update.items():
            drawn = noise.setdefault(name, torch.randn(change.shape, generator=rng))  # the same for every method of the audit
            exposure.update[name] = (drawn * change.norm() / drawn.norm()).to(change)
        return exposure

    evidence = Inputs.evidence
    Inputs.evidence = lambda self, *_: []  # needs PIL, and nobody looks at them
    module.expose = expose
    try:
        yield
    finally:
        Inputs.evidence = evidence
        module.expose = honest


def interval(hits: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's exact interval of a share."""
    low = float(beta.ppf((1 - level) / 2, hits, count - hits + 1)) if hits else 0.0
    high = float(beta.ppf((1 + level) / 2, hits + 1, count - hits)) if hits < count else 1.0
    return low, high


def row(name: str, results: list[Result]) -> dict[str, Any]:
    hits = sum(bool(result.leaked) for result in results)
    low, high = interval(hits, len(results))
    surfaces = {surface: sum(surface in result.leaked for result in results) for surface in SURFACES}
    proved = sum(result.proved for result in results)
    return {"group": name, "audits": len(results), "leaked": hits, "low": low, "high": high, **surfaces, "coincidences": proved}


def table(results: list[Result]) -> list[dict[str, Any]]:
    """One row a group: all empty updates, and each kind, batch size, net and data set; then the same of true updates."""
    rows = []
    for title, chosen in (
        ("empty", [r for r in results if r.case.update != "true"]),
        ("true", [r for r in results if r.case.update == "true"]),
    ):
        if not chosen:
            continue
        rows.append(row(f"{title}: all", chosen))
        for name in ("update", "auxiliary", "batch_size", "net", "data"):
            for value in dict.fromkeys(sorted((getattr(r.case, name) for r in chosen), key=str)):
                rows.append(row(f"{title}: {name} {value}", [r for r in chosen if getattr(r.case, name) == value]))
    return rows


def write_record(file: Path, rows: list[dict[str, Any]], results: list[Result], runs: list[dict[str, str]]) -> None:
    """The table for docs/results/word.md, and which surfaces the true updates leaked on."""
    shown = [r for r in rows if r["group"].startswith("empty") or r["group"] == "true: all"]
    cells = [
        [r["group"], r["audits"], r["leaked"], f"{r['leaked'] / r['audits']:.1%}", f"{r['low']:.1%} to {r['high']:.1%}", r["coincidences"]]
        for r in shown
    ]
    findings = []
    for r in rows:
        if r["group"] == "empty: all":
            said = f"{r['leaked'] / r['audits']:.1%} do, 95 % interval {r['low']:.1%} to {r['high']:.1%}"
            findings.append(f"At most 5 % of the audits of empty updates may say leaked. {said}.")
        if r["group"] == "true: all":
            counts = ", ".join(f"{surface} {r[surface]}" for surface in SURFACES)
            findings.append(f"Of {r['audits']} audits of true updates {r['leaked']} say leaked: {counts}.")
    crashed = sum(len(result.crashed) for result in results)
    findings += [f"{crashed} methods crashed."] if crashed else []
    columns = ["updates", "audits", "leaked", "share", "95 % interval", "by coincidence"]
    seeds = " and ".join(run["seeds"] for run in runs)
    write_measurement(file, f"{seeds}, used for nothing else", columns, cells, findings, [run["command"] for run in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="audits of empty updates")
    parser.add_argument("--power", type=int, default=240, help="audits of true updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="of inverting_gradients")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    parser.add_argument("--sets", nargs="+", choices=DATASETS, default=DATASETS, help="of images")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no audit is begun")
    parser.add_argument("--merge", type=Path, nargs="+", help="no audits: the sum of what --out wrote in these files")
    options = parser.parse_args()
    if options.merge:
        parts = [stored(file) for file in options.merge]
        results, runs = [result for part, _ in parts for result in part], [run for _, runs in parts for run in runs]
    else:
        end = time.time() + options.seconds
        arguments = [(end, case, options.data, options.steps) for case in tasks(options.draws, options.power, options.seed, options.sets)]
        if options.jobs == 1:
            said = [carry_out_in_time(*argument) for argument in arguments]
        else:
            with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
                said = pool.starmap(carry_out_in_time, arguments, chunksize=1)
        results = [result for result in said if result is not None]
        runs = [{"command": command_line(sys.argv), "seeds": f"from {options.seed}"}]
    rows = table(results)
    headings = " ".join(f"{name:>6}" for name in ("labels", "feat.", "maps", "inputs", "coinc."))
    print(f"{'updates':34} {'audits':>6} {'leaked':>6} {'share':>7} {'95 % interval':>17} {headings}")
    for r in rows:
        share, between = r["leaked"] / r["audits"], f"{r['low']:.1%} to {r['high']:.1%}"
        counts = " ".join(f"{r[name]:6}" for name in (*SURFACES, "coincidences"))
        print(f"{r['group']:34} {r['audits']:6} {r['leaked']:6} {share:7.1%} {between:>17} {counts}")
    print("records without a foreign null:", sum(result.missing_nulls for result in results), "of", sum(r.records for r in results))
    print("crashed methods:", sum(len(result.crashed) for result in results), *{text for r in results for text in r.crashed})
    print("seconds of all audits:", round(sum(result.seconds for result in results)))
    if options.record:
        write_record(options.record, rows, results, runs)
    if options.out:
        options.out.write_text(json.dumps({"runs": runs, "rows": rows, "results": [asdict(result) for result in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
