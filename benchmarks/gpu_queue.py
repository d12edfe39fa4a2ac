"""Run the papers' tables as a queue: many records at a time on one device, within a limit of time, resumed after a cut.

    python benchmarks/gpu_queue.py hfginv/table1 hfginv/table2 --data DIR --out DIR --workers 3 --plan
    python benchmarks/gpu_queue.py hfginv/table1 hfginv/table2 --data DIR --out DIR --workers 3 --seconds 280
    python benchmarks/gpu_queue.py ilrg soft-labels thesis --quick --device cpu --workers 16 --data DIR --out DIR --seconds 500

A job is one record: one method on one batch of one row. `--plan` prints the jobs that are left and what they will cost, and runs
nothing. A row's cost is the mean of its records so far; a row without a record counts as unknown. At the end of the time every job is
asked to stop; its attack saves a checkpoint, and the next call goes on from there. Then every table is written as DIR/<table>.json,
with the rows that are not whole marked as skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dosimeter.artefacts import save_checkpoints
from dosimeter.config import digest
from dosimeter.records import FILE_NAME, claim_cell, read_records, write_record
from dosimeter.runs.reproduction.inventory import CUT, tables_of, write_result
from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.reproduce import asked_quantities, at_hand, reproduce
from dosimeter.runs.reproduction.tables import Row, Table, read_table
from dosimeter.stopping import Stopped, stopping_on_signals

JOBS = "jobs"  # the folder of the jobs' records
SECONDS_TO_STOP = 20.0  # a stopped job writes its checkpoint in this time


@dataclass(frozen=True)
class Job:
    """One record of a table: a method on one batch of a row."""

    table: str
    row: int
    repeat: int
    column: str

    def folder(self, out: Path) -> Path:
        return out / JOBS / self.table / f"{self.row}-{self.repeat}-{re.sub(r'[^A-Za-z0-9]+', '-', self.column)}"

    @property
    def name(self) -> str:
        return f"{self.table} row {self.row} batch {self.repeat} {self.column}"

    def is_done(self, out: Path) -> bool:
        return (self.folder(out) / FILE_NAME).is_file()

    def seconds(self, out: Path) -> float:
        return sum(record.seconds for record in read_records(self.folder(out)))


def jobs_of(table: Table) -> list[Job]:
    """The jobs of a table, first batches first, so that a cut leaves every row with a number."""
    rows = [(position, row) for position, row in enumerate(table.rows) if not row.skip]
    most = max((row.repeats for _, row in rows), default=0)
    return [
        Job(table.key, position, repeat, column)
        for repeat in range(most)
        for position, row in rows
        if repeat < row.repeats
        for column in row.methods
    ]


def forecast(jobs: Sequence[Job], out: Path) -> tuple[float, int]:
    """The seconds of the jobs that are left, on one worker, and how many of these jobs have no record of their kind to go by."""
    known: dict[tuple[str, int, str], list[float]] = {}
    for job in jobs:
        if job.is_done(out):
            known.setdefault((job.table, job.row, job.column), []).append(job.seconds(out))
    left = [job for job in jobs if not job.is_done(out)]
    times = [known.get((job.table, job.row, job.column)) for job in left]
    return sum(sum(found) / len(found) for found in times if found), sum(not found for found in times)


def run_job(job: Job, table: Table, library: Library, out: Path, device: str) -> None:
    row = table.rows[job.row]
    asked = tuple(sorted(asked_quantities(table)))  # by the table's other rows and laws too
    alone = replace(row, repeats=1, methods={job.column: row.methods[job.column]}, studies={}, published={}, show=asked)
    folder = job.folder(out)
    with save_checkpoints(folder / "checkpoints", 30.0):
        reproduce(replace(table, rows=(alone,), laws=(), seed=table.seed + job.repeat), library, out=folder, device=device)


def collect(table: Table, jobs: Sequence[Job], library: Library, out: Path, device: str) -> None:
    """The table's result from the jobs' records. A row with a missing record is skipped and says how far it came."""
    folder = out / table.key
    shutil.rmtree(folder, ignore_errors=True)
    for job in jobs:
        for record in read_records(job.folder(out)) if job.is_done(out) else ():
            write_record(folder, record)
    rows = tuple(_as_far(row, position, jobs, out) for position, row in enumerate(table.rows))
    write_result(out, reproduce(replace(table, rows=rows), library, out=folder, device=device))


def _as_far(row: Row, position: int, jobs: Sequence[Job], out: Path) -> Row:
    """The row with the batches that are whole."""
    missing = [job.repeat for job in jobs if job.row == position and not job.is_done(out)]
    whole = min(missing, default=row.repeats)
    if row.skip or whole == row.repeats:
        return row
    if whole == 0:
        return replace(row, skip="no batch was finished in the time given")
    return replace(row, repeats=whole, departures=(*row.departures, f"{whole} of {row.repeats} {CUT}"))


def work(jobs: Sequence[Job], tables: Mapping[str, Table], library: Library, out: Path, device: str) -> None:
    """One worker: every job that is neither done nor claimed by another worker. A job that fails says so, and the next one runs."""
    with contextlib.suppress(Stopped), stopping_on_signals():
        for job in jobs:
            with claim_cell(out / JOBS, digest(job.name)) as mine:
                if not mine or job.is_done(out):
                    continue
                try:
                    run_job(job, tables[job.table], library, out, device)
                    print(f"{job.name} done in {job.seconds(out):.1f} s", flush=True)
                except Exception as error:
                    print(f"{job.name} failed: {type(error).__name__}: {error}", flush=True)


def run_workers(command: Sequence[str], workers: int, seconds: float) -> int:
    """Start the workers, ask them to stop when the time is over, and count those that ended with an error."""
    running = [subprocess.Popen([*command, "--worker"], env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(workers)]
    _wait(running, seconds)
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    cut = _wait(running, SECONDS_TO_STOP)
    for process in cut:
        process.kill()
        process.wait()
    return sum(process.returncode > 0 for process in running)


def _wait(running: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """The processes that still run after so many seconds."""
    until = time.monotonic() + seconds
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    return [process for process in running if process.poll() is None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    library = Library(data=options.data, cache=options.cache or options.out / "cache")
    keys = [key for word in options.tables for key in (tables_of(word) or [word])]
    tables = {table.key: table for table in (_table(key, options, library) for key in keys)}
    jobs = {key: jobs_of(table) for key, table in tables.items()}
    if options.worker:
        in_turn = sorted((job for found in jobs.values() for job in found), key=lambda job: job.repeat)
        work(in_turn, tables, library, options.out, options.device)
        return 0
    _print_plan(jobs, options)
    if options.plan:
        return 0
    words = sys.argv[1:] if arguments is None else arguments
    failed = run_workers([sys.executable, os.path.abspath(__file__), *words], options.workers, options.seconds)
    for key, table in tables.items():
        try:
            collect(table, jobs[key], library, options.out, options.device)
        except FileNotFoundError as error:
            print(f"{key}: {error}")
    _print_plan(jobs, options)
    return 3 if failed else 0


def _table(key: str, options: argparse.Namespace, library: Library) -> Table:
    table = read_table(key, quick=options.quick)
    there = (at_hand(row, library) for row in table.rows)
    rows = tuple(row if re.search(options.rows, row.name) else replace(row, skip="not asked for") for row in there)
    repeats = tuple(replace(row, repeats=min(row.repeats, options.batches)) for row in rows) if options.batches else rows
    return replace(table, rows=repeats, seed=table.seed if options.seed is None else options.seed)


def _print_plan(jobs: dict[str, list[Job]], options: argparse.Namespace) -> None:
    for key, found in jobs.items():
        seconds, unknown = forecast(found, options.out)
        left = sum(not job.is_done(options.out) for job in found)
        words = f"about {seconds / options.workers:.0f} s on {options.workers} workers"
        print(f"{key}: {left} of {len(found)} jobs left, {words}" + (f", and {unknown} of unknown cost" if unknown else ""), flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="PAPER[/TABLE]")
    parser.add_argument("--out", type=Path, required=True, help="where records and results go")
    parser.add_argument("--data", type=Path, help="where the data sets and weights lie")
    parser.add_argument("--cache", type=Path, help="where trained models are kept (default: OUT/cache)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=3, help="jobs at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=280.0, help="stop after so long (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the quick profiles")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows whose name has this pattern")
    parser.add_argument("--batches", type=int, help="at most so many batches a row")
    parser.add_argument("--seed", type=int, help="of the first batch")
    parser.add_argument("--plan", action="store_true", help="print what is left and what it costs, and run nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
