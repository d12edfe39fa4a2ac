"""Who does the experiments of a sweep: processes of this machine, or the workers of a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dosimeter.config import construct
from dosimeter.models.named_code import allow_code, allowed_modules, check_allowed, module_of
from dosimeter.options import OptionError, first_line
from dosimeter.records import cell_path, check_cells_place
from dosimeter.runs.sweep import Cell, Sweep, cells_of, pending, set_threads, spread, was_unprepared, work

ROUNDS_WITHOUT_PROGRESS = 3  # in which every worker dies before it has done anything, until a sweep gives up
SECONDS_BETWEEN_LOOKS = 0.2
SAFE_PATH = "PYTHONSAFEPATH"  # a variable of Python's
Engine = Callable[[Path, dict[str, Any], Sequence[int]], None]

_log = logging.getLogger("dosimeter")


def run_sweep(
    content: dict[str, Any],
    folder: Path,
    *,
    workers: int = 1,
    engine: Engine | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Cell]:
    """Do every experiment of a sweep that the folder lacks, and return all its cells. `content` is its TOML file as plain data."""
    if workers < 1:
        raise OptionError("--workers", f"expected a positive number, got {workers}")
    check_cells_place(folder)
    sweep = construct(Sweep, content)
    for name in (model.name for model in sweep.models if module_of(model.name) is not None):
        check_allowed(name)
    cells = cells_of(sweep)
    for cell in cells:
        if was_unprepared(folder, cell.key):  # its files may be there now
            cell_path(folder, cell.key).unlink(missing_ok=True)
    engine = engine or Processes(progress=progress)
    failures = 0
    while left := pending(folder, cells):
        _log.info("%d of %d experiments to do", len(left), len(cells))
        engine(folder, content, list(spread(min(workers, len(left)), len(cells))))
        now = pending(folder, cells)
        failures = failures + 1 if len(now) == len(left) else 0
        if failures == ROUNDS_WITHOUT_PROGRESS or (now and all(_has_crashed(folder, cell) for cell in now)):
            break
    return cells


def _has_crashed(folder: Path, cell: Cell) -> bool:
    return cell_path(folder, cell.key).exists()  # it is there and does not count as done


def work_alone(folder: Path, content: dict[str, Any], start: int, workers: int, modules: frozenset[str], parent: int | None = None) -> None:
    """One worker of a sweep, in a process of its own, which may import `modules`.

    It ends after its present experiment where its parent is gone.
    """
    set_threads(workers)
    with allow_code(modules):
        work(folder, cells_of(construct(Sweep, content)), start=start, goes_on=lambda: parent is None or os.getppid() == parent)


class Processes:
    """Workers as processes of this machine. A worker that dies is not missed: what it left is done in the next round."""

    def __init__(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        self.progress = progress

    def __call__(self, folder: Path, content: dict[str, Any], starts: Sequence[int]) -> None:
        spawn = multiprocessing.get_context("spawn")
        cells = cells_of(construct(Sweep, content))
        started = [
            spawn.Process(target=work_alone, args=(folder, content, start, len(starts), allowed_modules(), os.getpid())) for start in starts
        ]
        try:
            with _no_working_directory():
                for process in started:
                    process.start()
            while any(process.is_alive() for process in started):
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if self.progress is not None:
                    self.progress(len(cells) - len(pending(folder, cells)), len(cells), "experiments")
        finally:
            for process in started:
                if process.is_alive():
                    process.terminate()
            for process in started:
                if process.pid is not None:
                    process.join()


@contextmanager
def _no_working_directory() -> Iterator[None]:
    """Python processes that are started here look for no module in the working directory, whose files must not shadow installed ones."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


class Ray:
    """Workers of a Ray cluster, of this machine where no address is given. The folder must be one that all machines see."""

    def __init__(self, *, address: str | None = None, gpus: float = 0.0) -> None:
        self.address, self.gpus = address, gpus

    def __call__(self, folder: Path, content: dict[str, Any], starts: Sequence[int]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("--on ray: needs Ray, which is not installed here: pip install 'dosimeter[ray]'") from None
        cpus = None if self.address else len(starts)
        ray.init(address=self.address, num_cpus=cpus, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
        try:
            task = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=0)(work_alone)
            waiting = [task.remote(folder.absolute(), content, start, len(starts), allowed_modules()) for start in starts]
            while waiting:
                ready, waiting = ray.wait(waiting)
                for result in ready:
                    try:
                        ray.get(result)
                    except Exception as error:  # a worker died; the next round does what it left
                        _log.warning("a worker ended: %s", first_line(error))
        finally:
            ray.shutdown()
