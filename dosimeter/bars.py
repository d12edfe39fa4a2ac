"""Progress for people: bars in a terminal and in a notebook, plain lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dosimeter.numbers import duration
from dosimeter.progress import Listener, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

SECONDS_BETWEEN_LINES = 30.0  # of one method, in a log
LEAST_FORECAST = 5.0  # seconds; of a shorter audit nobody wants to know how long it takes

_log = logging.getLogger("dosimeter")


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """One bar over the methods, one over the steps of the present one; in a log, a line where a method begins and ends."""
    if not shows_bars():
        log = _Log()
        yield log.show
        log.finish()
        return
    with _bars() as bars:
        whole, part = bars.add_task("audit", note=""), bars.add_task("", note="", visible=False)

        def show(progress: Progress) -> None:
            left = f"about {duration(progress.left)} left" if progress.left and progress.left > LEAST_FORECAST else ""
            bars.update(whole, description="audit", completed=progress.position, total=progress.methods, note=left)
            method = f"timing {progress.method}" if progress.timed else progress.method
            bars.update(part, description=method, completed=progress.done, total=progress.steps, note=progress.note, visible=True)

        yield show
        bars.update(whole, completed=bars.tasks[whole].total)
        bars.update(part, visible=False)


@contextmanager
def step_bar() -> Iterator[Listener]:
    """One bar over the steps; in a log, a line now and then."""
    if not shows_bars():
        yield _Pace().step
        return
    with _bars() as bars:
        task = bars.add_task("working", note="")
        yield lambda done, total, note: bars.update(task, completed=done, total=total, note=note)


def shows_bars() -> bool:
    """Whether somebody looks on: at a terminal, or in a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


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
            _log.info(", ".join(part for part in parts if part))


class _Log:
    """A line on how long it will take, one where a method begins, one where it ends, and others in between where it takes long."""

    def __init__(self) -> None:
        self.present: tuple[str, int] | None = None
        self.forecast = False
        self.pace = _Pace()

    def show(self, progress: Progress) -> None:
        if progress.timed:
            _log.info("one step of %s is timed", progress.method)
            return
        if not self.forecast and progress.left is not None and progress.left > LEAST_FORECAST:
            self.forecast = True
            _log.info("the attacks will take about %s", duration(progress.left))
        if self.present != (progress.method, progress.position):
            self.finish()
            self.present, self.pace = (progress.method, progress.position), _Pace(progress.method)
            _log.info("%d of %d: %s begins", progress.position + 1, progress.methods, progress.method)
        self.pace.step(progress.done, progress.steps, progress.note)

    def finish(self) -> None:
        if self.present is not None:
            _log.info("%s ends after %.1f s", self.present[0], time.monotonic() - self.pace.began)
        self.present = None


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    return Bars(*columns, console=Console(stderr=not _in_notebook()), transient=True)
