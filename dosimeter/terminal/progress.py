"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from dosimeter.progress import Listener

if TYPE_CHECKING:
    from dosimeter.runs.audit import Progress


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """One bar over the methods, one over the steps of the present one."""
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
    with _bars() as bars:
        task = bars.add_task("working", note="")
        yield lambda done, total, note: bars.update(task, completed=done, total=total, note=note)


def _bars() -> Bars:
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
