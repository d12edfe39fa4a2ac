"""Whether an audit that is killed, stopped or out of disk loses nothing, repeats nothing, and ends as if nothing had happened.

    python benchmarks/kills.py --kills 50 --seed 7 --record FILE.json

An audit of two digits is killed again and again, and the same command resumes it until it ends; then the next one begins. Every other kill
falls into an attack, right behind its checkpoint; the others fall anywhere. No record that was on disk may change or be missing. The whole
audit must have the records of one that nothing stopped, but for the times and for the step at which an attack resumed. A limit on the size
of files stands for the full disk: a write ends in the middle with an error. The same command then ends the audit without the limit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import field
from pathlib import Path
from typing import Any

from dosimeter.artefacts import CHECKPOINT_FOLDER
from dosimeter.cli import main as run_command
from dosimeter.records import FILE_NAME, read_records

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LARGEST_FILES = (0, 1, 2000, 3000, 20_000, 100_000)  # bytes that a file may have where the disk is full
PATIENCE = 30  # seconds that a signal may take
WORDS = ["audit", "data.name=digits", "data.batch_size=2", 'labels=["idlg", "ilrg", "llg"]', "features=[]"]
WORDS += ['attacks=[{name="inverting_gradients", steps=60}, {name="dlg", steps=30}]', "--checkpoint-every", "0"]
COLUMNS = (
    "what",
    "times",
    "audits",
    "records lost or changed",
    "made twice",
    "other than undisturbed",
    "checkpoints left",
    "other exit codes",
)


@dataclasses.dataclass
class Found:
    """What kills, or full disks, did to audits."""

    audits: int = 0
    resumed: int = 0  # attacks that went on from a checkpoint
    counts: Counter[str] = field(default_factory=Counter)  # kills by signal
    faults: Counter[str] = field(default_factory=Counter)  # by the heading of their column
    slowest: float = 0.0  # seconds from a signal to the end

    def row(self, what: str, times: int) -> list[Any]:
        return [what, times, self.audits, *(self.faults[column] for column in COLUMNS[3:])]


class Audits:
    """Audits as processes that have imported everything when they begin, so that the instants fall into the audit itself."""

    def __init__(self, folder: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["dosimeter.cli", "dosimeter.runs.audit", "dosimeter.report.page", "dosimeter.data.load"])
        self.folder, self.seconds = folder, 0.0
        for name in ("first", "second"):  # the first one waits for the imports
            began, process = time.monotonic(), self.start(folder / name)
            process.join()
            if process.exitcode:
                raise RuntimeError(f"an audit that nothing stopped ended with {process.exitcode}")
            self.seconds = time.monotonic() - began
        self.expected = comparable(folder / "second")

    def start(self, folder: Path, largest_file: int | None = None) -> Any:
        folder.mkdir(exist_ok=True)
        process = self.context.Process(target=audit, args=(str(folder), largest_file))
        process.start()
        return process


def audit(folder: str, largest_file: int | None) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.exit(run_command([*WORDS, "--out", folder]))


def comparable(folder: Path) -> dict[str, Any]:
    """The records by their key, without what differs from run to run: the times, and the step at which an attack resumed."""
    found = {}
    for record in read_records(folder):
        details = copy.deepcopy(record.details)
        details["message"] = "; ".join(part for part in details.get("message", "").split("; ") if not re.match("resumed at step", part))
        details.get("ceiling", {}).pop("seconds", None)
        found[record.key] = dataclasses.replace(record, seconds=0.0, details=details)
    return found


def whole_lines(folder: Path) -> list[bytes]:
    path = folder / FILE_NAME
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def wait_for_checkpoint(folder: Path, process: Any) -> None:
    """Until an attack of this process has saved itself, so that the next kill falls into an attack."""
    began = time.time()
    while process.is_alive() and not any(_written_since(began, file) for file in (folder / CHECKPOINT_FOLDER).glob("*.safetensors")):
        time.sleep(0.005)


def _written_since(began: float, file: Path) -> bool:
    try:
        return file.stat().st_mtime > began
    except FileNotFoundError:  # the attack has ended
        return False


def kill(audits: Audits, kills: int, seed: int) -> Found:
    """Kill audits at `kills` instants in all, and resume each until it ends."""
    chance, found = random.Random(seed), Found()
    done = 0
    while done < kills:
        folder, before = audits.folder / f"kills-{found.audits}", []
        while True:
            process = audits.start(folder)
            if done % 2:
                wait_for_checkpoint(folder, process)
                process.join(chance.uniform(0.0, 0.1))
            else:
                process.join(chance.uniform(0.0, audits.seconds))
            if process.exitcode is None and done < kills:
                number = SIGNALS[done % len(SIGNALS)]
                found.slowest = max(found.slowest, _stop(process, number))
                before_the_command = {1} if number == signal.SIGINT else set()  # multiprocessing ends so
                found.faults["other exit codes"] += process.exitcode not in {-number, 128 + number, 0} | before_the_command
                found.counts[number.name] += 1
                done += 1
            else:
                process.join()
                found.faults["other exit codes"] += process.exitcode != 0
            after = whole_lines(folder)
            found.faults["records lost or changed"] += after[: len(before)] != before
            if process.exitcode == 0 or _is_refused(process):
                break
            before = after
        _compare(audits, folder, len(after), found)
    return found


def _stop(process: Any, number: signal.Signals) -> float:
    """The seconds until the process ends after the signal."""
    began = time.monotonic()
    os.kill(process.pid, number)
    process.join(PATIENCE)
    seconds = time.monotonic() - began
    if process.exitcode is None:
        process.kill()
        process.join()
    return seconds


def _is_refused(process: Any) -> bool:
    """Whether the command ended by itself without success: resuming goes on for ever then."""
    return process.exitcode in (2, 3)


def _compare(audits: Audits, folder: Path, lines: int, found: Found) -> None:
    """Hold an audit that has ended against the one that nothing stopped."""
    found.audits += 1
    found.faults["made twice"] += lines > len(audits.expected)
    found.faults["other than undisturbed"] += comparable(folder) != audits.expected
    found.faults["checkpoints left"] += any((folder / CHECKPOINT_FOLDER).iterdir())
    found.resumed += sum("resumed at step" in record.details.get("message", "") for record in read_records(folder))


def fill_disk(audits: Audits, largest_file: int) -> Found:
    """One audit whose files end at `largest_file` bytes, and the same one afterwards without that limit."""
    found, folder = Found(), audits.folder / f"disk-{largest_file}"
    process = audits.start(folder, largest_file)
    process.join()
    found.faults["other exit codes"] += process.exitcode not in (0, 2)
    if whole_lines(folder):
        known = {key for key, record in comparable(folder).items() if record.outcome != "crashed"}
        found.faults["records lost or changed"] += not known <= set(audits.expected)
    again = audits.start(folder)
    again.join()
    found.faults["other exit codes"] += again.exitcode != 0
    _compare(audits, folder, len(comparable(folder)), found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        audits = Audits(Path(place))
        killed = kill(audits, options.kills, options.seed)
        signals = ", ".join(f"{name} {count}" for name, count in sorted(killed.counts.items()))
        rows = [killed.row(f"kills: {signals}", options.kills)]
        rows += [fill_disk(audits, size).row(f"disk full at {size:,} bytes a file", 1) for size in LARGEST_FILES]
    findings = [
        f"{killed.resumed} attacks went on from a checkpoint. The longest way from a signal to the end took {killed.slowest:.1f} s. "
        f"An audit that nothing stops takes {audits.seconds:.1f} s and has {len(audits.expected)} records."
    ]
    for row in rows:
        sys.stdout.write("  ".join(f"{heading}: {value}" for heading, value in zip(COLUMNS, row)) + "\n")
    sys.stdout.write(f"{findings[0]}\n")
    if options.record:
        from measured import write_measurement

        write_measurement(options.record, str(options.seed), COLUMNS, rows, findings)


if __name__ == "__main__":
    main()
