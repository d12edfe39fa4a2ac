"""Progress on stderr: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from dosimeter.progress import Listener

if TYPE_CHECKING:
    from dosimeter.runs.audit import Progress

SECONDS_BETWEEN_LINES = 30.0  # of one method, in a log


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """One bar over the methods, one over the steps of the present one; in a log, a line where a method begins and ends."""
    if not sys.stderr.isatty():
        log = _Log()
        yield log.show
        log.finish()
        return
    with _bars() as bars:
        whole, part = bars.add_task("audit", note=""), bars.add_task("", note="", visible=False)

        def show(progress: Progress) -> None:
            bars.update(whole, description="audit", completed=progress.position, total=progress.methods)
            bars.update(part, description=progress.method, completed=progress.done, total=progress.steps, note=progress.note, visible=True)

        yield show
        bars.update(whole, completed=bars.tasks[whole].total)
        bars.update(part, visible=False)


@contextmanager
def step_bar() -> Iterator[Listener]:
    """One bar over the steps; in a log, a line now and then."""
    if not sys.stderr.isatty():
        yield _Pace().step
        return
    with _bars() as bars:
        task = bars.add_task("working", note="")
        yield lambda done, total, note: bars.update(task, completed=done, total=total, note=note)


class _Pace:
    """Lines on the steps of one computation, as many seconds apart as a reader of a log wants."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.began = self.said = time.monotonic()

    def step(self, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if now - self.said >= SECONDS_BETWEEN_LINES:
            self.said = now
            parts = (self.name, f"step {done} of {total}", note, f"{now - self.began:.0f} s")
            _write_line(", ".join(part for part in parts if part))


class _Log:
    """A line where a method begins, one where it ends, and others in between where it takes long."""

    def __init__(self) -> None:
        self.present: tuple[str, int] | None = None
        self.pace = _Pace()

    def show(self, progress: Progress) -> None:
        if self.present != (progress.method, progress.position):
            self.finish()
            self.present, self.pace = (progress.method, progress.position), _Pace(progress.method)
            _write_line(f"{progress.position + 1} of {progress.methods}: {progress.method} begins")
        self.pace.step(progress.done, progress.steps, progress.note)

    def finish(self) -> None:
        if self.present is not None:
            _write_line(f"{self.present[0]} ends after {time.monotonic() - self.pace.began:.1f} s")
        self.present = None


def _write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _bars() -> Bars:
    columns = (
        TextColumn("{task.description:24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True)
