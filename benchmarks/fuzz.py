"""Damaged and hostile files, command lines and calls: is each answered by a result or by one sentence?

    python benchmarks/fuzz.py --inputs 10000 --jobs 8 --out fuzz.json
    python benchmarks/fuzz.py --captures 10000 --seed 7 --record FILE.json

Each worker is a process of its own with a limit on its memory. A refusal is a ValueError or a TypeError that a `raise` of Dosimeter's own
code makes, or an OSError of the system. Any other exception counts as a traceback, 20 s of CPU or 120 s by the clock as a hang, 1 GB beyond
the start of the input as too much memory. An audit hook counts every program that is started, every connection, and every file that is
written outside of the input's own folder.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SECONDS = 20  # of CPU
LOADED = 6  # times as many seconds by the clock, where other programs share the cores
BYTES = 10**9
SPARE_BYTES = 3 * 10**9  # beyond what the worker has at its start; more is refused by the system
KINDS = ("files", "captures", "records", "commands", "calls")
FILES = {"files": "", "captures": "capture", "records": "records"}  # kinds of files, and the one reader of a kind
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork", "socket.connect", "pty.spawn")
ANSWERS = (ValueError, TypeError, OSError)
FAULTS = ("traceback", "hang", "memory", "deed", "died")
COLUMNS = ("inputs", "number", "answered", "refused", *FAULTS, "longest [CPU s]", "most memory [MB]")


class Hang(BaseException):
    pass


class Watch:
    """What an input does beside answering: programs, connections, and files written outside of its folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.deeds: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in FORBIDDEN:
            self.deeds.append(f"{event} {arguments[0]!r}")
        elif event == "open" and isinstance(arguments[0], (str, bytes)) and self._writes(arguments):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith((self.folder, os.environ["XDG_CACHE_HOME"], "/dev/null")):
                self.deeds.append(f"writes {path}")
        elif event in ("os.remove", "os.rename", "os.truncate", "os.mkdir", "os.symlink", "os.link"):
            path = os.path.abspath(os.fsdecode(arguments[0])) if isinstance(arguments[0], (str, bytes)) else ""
            if path and not path.startswith((self.folder, os.environ["XDG_CACHE_HOME"])):
                self.deeds.append(f"{event} {path}")

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        mode, flags = arguments[1], arguments[2]
        if isinstance(mode, str):
            return any(letter in mode for letter in "wax+")
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def attempt(action: Callable[[], object], watch: Watch, folder: Path) -> tuple[str, str, float, int]:
    """What became of one input, its seconds of CPU and the bytes that it took beyond those held at its start.

    It is "answered", "refused", or the kind of its fault and what is known of it.
    """
    before, began = _memory("VmRSS"), time.process_time()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
    watch.deeds.clear()
    watch.folder = str(folder)
    faulthandler.dump_traceback_later(LOADED * SECONDS + 10, exit=True)  # where not even a signal is taken
    signal.setitimer(signal.ITIMER_REAL, LOADED * SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            action()
        result = ("answered", "")
    except ANSWERS as error:
        own = isinstance(error, OSError) or _is_ours(error)
        result = ("refused", str(error)[:200]) if own else ("traceback", f"raw {type(error).__name__}: {str(error)[:150]} {_place()}")
    except Hang:
        result = ("hang", _place())
    except SystemExit as error:
        result = ("refused", f"exit {error.code}")
    except BaseException as error:
        result = ("traceback", f"{type(error).__name__}: {str(error)[:150]} {_place()}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        watch.folder = None
    seconds, grown = time.process_time() - began, _memory("VmHWM") - before
    if watch.deeds:
        result = ("deed", "; ".join(watch.deeds[:3]))
    elif grown > BYTES:
        result = ("memory", f"{grown / 1e9:.2f} GB")
    return result[0], result[1], seconds, grown


def _is_ours(error: BaseException) -> bool:
    """Whether a `raise` of Dosimeter's made the error, with words, and no library below it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "/dosimeter/" in last.filename and (last.line or "").startswith("raise ") and bool(str(error).strip())


def _place() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if "/dosimeter/" in frame.filename] or frames
    return f"({Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name})" if own else ""


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def file_inputs(count: int, seed: int, only: str = "") -> Iterator[tuple[str, dict[str, bytes], Callable[[Path], object]]]:
    """Hostile files first, then damaged ones, one reader after another; or for one reader `only`."""
    from fuzz_inputs import READERS as ALL_READERS
    from fuzz_inputs import damage_bytes

    readers = [reader for reader in ALL_READERS if only in ("", reader.name)]
    hostile = [(reader, files) for reader in readers for files in reader.hostile()]
    for reader, files in hostile[:count] if count < 2 * len(hostile) else hostile:
        yield f"{reader.name}, hostile", files, reader.read
    honest = {reader.name: reader.honest() for reader in readers}
    for number in range(max(0, count - len(hostile))):
        rng = random.Random(f"{seed} {number}")
        reader = readers[number % len(readers)]
        files = dict(rng.choice(honest[reader.name]))
        first, name = next(iter(files)), rng.choice(list(files)) if rng.random() < 0.2 else next(iter(files))
        files[name] = (reader.damage if reader.damage and name == first else damage_bytes)(files[name], rng)
        yield f"{reader.name}, damaged", files, reader.read


def actions(kind: str, count: int, seed: int) -> Iterator[tuple[str, dict[str, bytes], Callable[[Path], object]]]:
    """Every input: its name, its files (the first is handed over) and what is done with it."""
    if kind in FILES:
        yield from file_inputs(count, seed, FILES[kind])
        return
    from fuzz_calls import CALLS, command_line, run_command
    from fuzz_inputs import small_records

    small_records()  # an audit of its own makes them, before anything is watched
    for number in range(count):
        rng = random.Random(f"{kind} {seed} {number}")
        if kind == "commands":
            words, files = command_line(rng)
            yield " ".join(words)[:150], files, lambda path, words=words: run_command(words, path)
        else:
            name, call = rng.choice(CALLS)
            yield name, {"file": b""}, lambda path, call=call, rng=rng: call(rng, path)


def work(kind: str, count: int, seed: int, first: int, step: int, start: int, report: Path) -> None:
    """Carry out every `step`-th input from `first` on, and write a line for each to `report`."""
    import torch

    torch.set_num_threads(1)
    torch.rand(64, 64) @ torch.rand(64, 64)
    sandbox = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.environ["XDG_CACHE_HOME"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(sandbox / "cache")
    os.environ["HOME"] = str(sandbox)
    os.chdir(sandbox)
    signal.signal(signal.SIGALRM, _raise_hang)
    signal.signal(signal.SIGPROF, _raise_hang)
    watch, limited = Watch(), False
    with report.open("a") as lines:
        for number, (name, files, action) in enumerate(actions(kind, count, seed)):
            if number % step != first or number < start:
                continue
            if not limited:
                limited = True
                resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + SPARE_BYTES, resource.RLIM_INFINITY))
            folder = sandbox / "input"
            os.chdir(sandbox)
            shutil.rmtree(folder, ignore_errors=True)
            for relative, data in files.items():
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
                (folder / relative).write_bytes(data)
            os.chdir(folder)  # where a command writes that is told nothing else
            lines.write(f"{json.dumps([number, name, 'died', '', 0.0, 0])}\n")
            lines.flush()
            result = attempt(lambda: action(folder / next(iter(files))), watch, folder)  # noqa: B023
            lines.write(f"{json.dumps([number, name, *result])}\n")
            lines.flush()
    os.chdir("/")
    shutil.rmtree(sandbox, ignore_errors=True)


def _raise_hang(*_: Any) -> None:
    raise Hang


def run(kind: str, count: int, *, seed: int = 0, jobs: int = 1) -> dict[str, Any]:
    """Every input of a kind in `jobs` processes; a process that dies is started again behind the input that killed it."""
    found: dict[int, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        waiting = {first: _start(kind, count, seed, first, jobs, 0, Path(folder) / f"{first}") for first in range(jobs)}
        while waiting:
            first, process = next(iter(waiting.items()))
            code = process.wait()
            lines = (Path(folder) / f"{first}").read_text().splitlines() if (Path(folder) / f"{first}").exists() else []
            last = -1
            for line in lines:
                number, *rest = json.loads(line)
                found[number], last = rest, number
            del waiting[first]
            if code and (last < 0 or found[last][1] != "died"):
                raise RuntimeError(f"a worker stopped with code {code} outside of any input")
            if code:
                waiting[first] = _start(kind, count, seed, first, jobs, last + 1, Path(folder) / f"{first}")
    faults = [rest[:3] for _, rest in sorted(found.items()) if rest[1] in FAULTS]
    answered = sorted({rest[0] for rest in found.values() if rest[1] == "answered"})
    most = {"seconds": max(rest[3] for rest in found.values()), "bytes": max(rest[4] for rest in found.values())}
    counts = dict(Counter(rest[1] for rest in found.values()))
    return {"kind": kind, "inputs": len(found), "counts": counts, "faults": faults, "answered": answered, **most}


def record(file: Path, results: list[dict[str, Any]], seed: int) -> None:
    """What docs/results says of a run: a row a kind, and each fault in words."""
    from measured import write_measurement

    counted = ("answered", "refused", *FAULTS)
    rows = [
        [r["kind"], r["inputs"], *(r["counts"].get(name, 0) for name in counted), round(r["seconds"], 1), round(r["bytes"] / 1e6)]
        for r in results
    ]
    findings = [f"{fault} in {r['kind']}: {name}: {words}." for r in results for name, fault, words in r["faults"]]
    write_measurement(file, str(seed), COLUMNS, rows, findings)


def _start(kind: str, count: int, seed: int, first: int, jobs: int, start: int, report: Path) -> subprocess.Popen[bytes]:
    words = ["--work", kind, "--inputs", str(count), "--seed", str(seed), "--jobs", str(jobs), "--first", str(first), "--start", str(start)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return subprocess.Popen([sys.executable, __file__, *words, "--report", str(report)], env=environment, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10000, help="files")
    parser.add_argument("--captures", type=int, default=0, help="captures alone")
    parser.add_argument("--records", type=int, default=0, help="records alone")
    parser.add_argument("--commands", type=int, default=500)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="where the faults go, as JSON")
    parser.add_argument("--record", type=Path, help="where docs/results finds the table")
    for name in ("--work", "--report"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--first", "--start"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.inputs, options.seed, options.first, options.jobs, options.start, Path(options.report))
        return
    counts = dict(zip(KINDS, (options.inputs, options.captures, options.records, options.commands, options.calls)))
    results = [run(kind, count, seed=options.seed, jobs=options.jobs) for kind, count in counts.items() if count]
    for result in results:
        sys.stdout.write(f"{result['kind']}: {result['inputs']} inputs, {result['counts']}\n")
        for name, fault, words in result["faults"][:40]:
            sys.stdout.write(f"  {fault}: {name}: {words}\n")
    if options.out:
        options.out.write_text(json.dumps(results, indent=2))
    if options.record:
        record(options.record, results, options.seed)


if __name__ == "__main__":
    main()
