"""Looks for false proofs: certificates and claims of every method, on fresh configurations of many kinds, held against the truth.

    python benchmarks/certificates.py --seed 1 --draws 20 --jobs 16 --seconds 550 --out after.json [--data ../shared/data]
    PYTHONPATH=OLDER_TREE python benchmarks/certificates.py --seed 1 --draws 20 --jobs 16 --out before.json
    python benchmarks/certificates.py --merge after-1.json after-2.json --before before.json --record certificates.json
    python benchmarks/certificates.py --seed 1 --draws 400 --claims 20600 --record certificates.json

A kind of draw is a function of a seed that returns rows (`certificate_kinds/kind.py`). Every module in `certificate_kinds/` with a function
`kinds(data)` takes part. A draw that crashes or takes longer than `--limit` seconds is counted as an error and printed; the others go on.
`--claims N` ends the campaign when N certificates were given. A false certificate is excused only where its kind breaks a premise, and the
certificate prints that premise. The exit status is 1 where one is not excused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import certificate_kinds
import torch
from certificate_kinds.kind import Kind, Row
from measured import command_line, write_measurement

from dosimeter.types import Refused

COUNTS = ("draws", "samples", "recovered", "certified", "recovered_and_certified", "false", "excused", "refused", "errors")
SHOWN_EXAMPLES = 40  # false certificates and errors that the table lists

Result = dict[str, Any]  # kind, seed, the counts of one draw, and "note": what is false or went wrong
Summary = dict[str, Any]  # kinds: counts by kind; notes: examples; skipped: reasons by kind; runs: command and seeds of each part


def all_kinds(data: Path | None) -> dict[str, Kind]:
    """Every kind by name, from all modules that have some. An older tree may lack what a module's kinds are about."""
    found: dict[str, Kind] = {}
    for module in pkgutil.iter_modules(certificate_kinds.__path__):
        try:
            offered = getattr(importlib.import_module(f"certificate_kinds.{module.name}"), "kinds", None)
        except ImportError as absent:
            if not (absent.name or "").startswith("dosimeter"):
                raise
            print(f"the kinds of {module.name} are left out: this tree has no {absent.name}", file=sys.stderr)
            continue
        for kind in offered(data) if offered else ():
            if kind.name in found:
                raise ValueError(f"kinds: {kind.name!r} exists twice")
            found[kind.name] = kind
    return found


@cache
def _kinds_here(data: Path | None) -> dict[str, Kind]:
    return all_kinds(data)


def run_draw(name: str, seed: int, data: Path | None, limit: int) -> Result:
    """One draw of one kind, in whatever process this is."""
    torch.set_num_threads(1)
    kind = _kinds_here(data)[name]
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(limit)
    try:
        return measure(kind, seed, kind.draw(seed))
    except Refused as reason:
        return {"kind": name, "seed": seed, "draws": 1, "refused": 1, "refusal": str(reason)}
    except Exception as error:  # a finding like any other, which must not end the campaign
        return {"kind": name, "seed": seed, "draws": 1, "errors": 1, "note": f"{type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)


def _stop(*_: object) -> None:
    raise TimeoutError("the draw took too long")


def measure(kind: Kind, seed: int, rows: Iterable[Row]) -> Result:
    """The counts of one draw's rows."""
    rows = list(rows)
    false = [row for row in rows if row.certified and not row.true]
    excused = [row for row in false if kind.breaks and any(kind.breaks in premise for premise in row.premises)]
    result = {
        "kind": kind.name,
        "seed": seed,
        "draws": 1,
        "samples": sum(row.samples for row in rows),
        "recovered": sum(row.recovered for row in rows),
        "certified": sum(row.certified for row in rows),
        "recovered_and_certified": sum(row.recovered and row.certified for row in rows),
        "false": len(false) - len(excused),
        "excused": len(excused),
    }
    return result | ({"note": f"{len(false) - len(excused)} false"} if len(false) > len(excused) else {})


def campaign(names: list[str], arguments: argparse.Namespace) -> Iterator[Result]:
    """The results as they come, turn by turn over all kinds; at most `--draws` turns, `--seconds`, and `--claims` certificates."""
    end = time.monotonic() + arguments.seconds
    tasks = [(name, arguments.seed + turn) for turn in range(arguments.draws) for name in names]
    certified = 0
    if arguments.jobs == 1:
        for name, seed in tasks:
            if time.monotonic() > end or (arguments.claims and certified >= arguments.claims):
                return
            result = run_draw(name, seed, arguments.data, arguments.limit)
            certified += result.get("certified", 0)
            yield result
        return
    tasks.reverse()
    while tasks:
        running: dict[Future[Result], tuple[str, int]] = {}
        with ProcessPoolExecutor(arguments.jobs) as pool:
            try:
                while tasks or running:
                    over = time.monotonic() > end or (arguments.claims and certified >= arguments.claims)
                    if over:
                        tasks.clear()
                    while tasks and len(running) < 2 * arguments.jobs:
                        name, seed = tasks.pop()
                        running[pool.submit(run_draw, name, seed, arguments.data, arguments.limit)] = (name, seed)
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        running.pop(future)
                        certified += result.get("certified", 0)
                        yield result
            except BrokenProcessPool:  # one process died, of memory for instance; its companions' draws are lost with it
                for name, seed in running.values():
                    yield {"kind": name, "seed": seed, "draws": 1, "errors": 1, "note": "the process died"}


def summarise(results: Iterable[Result], skipped: dict[str, str]) -> Summary:
    kinds: dict[str, dict[str, int]] = {}
    notes: list[str] = []
    for result in results:
        counts = kinds.setdefault(result["kind"], dict.fromkeys(COUNTS, 0))
        for key in COUNTS:
            counts[key] += result.get(key, 0)
        if "note" in result:
            notes.append(f"{result['kind']}, seed {result['seed']}: {result['note']}")
    return {"kinds": dict(sorted(kinds.items())), "notes": sorted(notes), "skipped": skipped}


def merge(summaries: Iterable[Summary]) -> Summary:
    """The sum of campaigns that drew other seeds."""
    summaries = list(summaries)
    results = [{"kind": name, **counts} for summary in summaries for name, counts in summary["kinds"].items()]
    merged = summarise(results, {})
    skipped = {name: reason for summary in summaries for name, reason in summary["skipped"].items() if name not in merged["kinds"]}
    notes = sorted(note for summary in summaries for note in summary["notes"])
    return merged | {"notes": notes, "skipped": skipped, "runs": [run for summary in summaries for run in summary.get("runs", [])]}


def run_of(summary: Summary, seed: int) -> dict[str, str]:
    """The command of a campaign and the seeds it came to."""
    turns = max((counts["draws"] for counts in summary["kinds"].values()), default=1)
    return {"command": command_line(sys.argv), "seeds": f"{seed} to {seed + turns - 1}"}


def share(counts: dict[str, int]) -> float | None:
    """The share of right answers that is certified."""
    return counts["recovered_and_certified"] / counts["recovered"] if counts["recovered"] else None


def print_table(summary: Summary, before: Summary | None) -> None:
    columns = [
        "kind",
        "draws",
        "samples",
        "true recoveries",
        "certified",
        "false",
        "premise printed",
        "refused",
        "errors",
        "certified share",
    ]
    columns += ["before", "false before"] if before else []
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    total = {key: sum(counts[key] for counts in summary["kinds"].values()) for key in COUNTS}
    for name, counts in [*summary["kinds"].items(), ("all", total)]:
        keys = ("draws", "samples", "recovered", "certified", "false", "excused", "refused", "errors")
        cells = [name, *(f"{counts[key]:,}" for key in keys), _percent(share(counts))]
        if before:
            earlier = before["kinds"].get(name)
            cells += ["–", "–"] if earlier is None else [_percent(share(earlier)), f"{earlier['false'] + earlier['excused']:,}"]
        print("| " + " | ".join(cells) + " |")
    for reason in sorted(set(summary["skipped"].values())):
        names = [name for name, why in summary["skipped"].items() if why == reason]
        print(f"{len(names)} kinds skipped: {reason}")
    for note in summary["notes"][:SHOWN_EXAMPLES]:
        print(note)
    if len(summary["notes"]) > SHOWN_EXAMPLES:
        print(f"and {len(summary['notes']) - SHOWN_EXAMPLES} more")


def write_record(file: Path, summary: Summary) -> None:
    """One row a method, for docs/results/word.md; and a sentence on what is false, went wrong or was left out."""
    methods: dict[str, list[dict[str, int]]] = {}
    for name, counts in summary["kinds"].items():
        methods.setdefault(name.partition(":")[0], []).append(counts)
    everything = list(summary["kinds"].values())
    rows = []
    for name, group in [*((f"`{name}`", group) for name, group in sorted(methods.items())), ("all", everything)]:
        total = {key: sum(counts[key] for counts in group) for key in COUNTS}
        shown = [total[key] for key in ("draws", "certified", "false", "excused", "refused", "errors")]
        rows.append([name, len(group), *shown, _percent(share(total))])
    certified, false = (sum(counts[key] for counts in everything) for key in ("certified", "false"))
    findings = [f"{false:,} false certificates in contract out of {certified:,}."]
    for reason in sorted(set(summary["skipped"].values())):
        findings.append(f"{list(summary['skipped'].values()).count(reason)} kinds were left out: {reason}.")
    findings += [f"{note.rstrip('.')}." for note in summary["notes"][:SHOWN_EXAMPLES]]
    columns = ["methods", "kinds", "draws", "certified", "false", "excused", "refused", "errors", "share"]
    seeds = ", ".join(run["seeds"] for run in summary["runs"])
    write_measurement(file, f"{seeds}, used for nothing else", columns, rows, findings, [run["command"] for run in summary["runs"]])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first turn; the next turn takes the next number")
    parser.add_argument("--draws", type=int, default=5, help="of each kind")
    parser.add_argument("--claims", type=int, default=0, help="certificates after which the campaign ends; 0: no end")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no draw is begun")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--data", type=Path, help="folder of the shared data")
    parser.add_argument("--out", type=Path, help="the summary as JSON")
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    parser.add_argument("--before", type=Path, help="a summary to compare with, of the same kinds and seeds on other code")
    parser.add_argument("--merge", type=Path, nargs="+", help="no draws: the sum of these summaries")
    arguments = parser.parse_args()
    if arguments.merge:
        summary = merge(json.loads(file.read_text(encoding="utf-8")) for file in arguments.merge)
    else:
        kinds = {name: kind for name, kind in all_kinds(arguments.data).items() if arguments.only in name}
        skipped = {name: kind.skipped for name, kind in kinds.items() if kind.skipped}
        summary = summarise(campaign([name for name in kinds if name not in skipped], arguments), skipped)
        summary["runs"] = [run_of(summary, arguments.seed)]
    if arguments.out:
        arguments.out.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    if arguments.record:
        write_record(arguments.record, summary)
    print_table(summary, json.loads(arguments.before.read_text(encoding="utf-8")) if arguments.before else None)
    return int(any(counts["false"] for counts in summary["kinds"].values()))


if __name__ == "__main__":
    sys.exit(main())
