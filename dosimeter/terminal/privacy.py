"""What a privacy setting states, and what holds, as `dosimeter privacy` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dosimeter.config import override
from dosimeter.runs.dp_guarantee import HEADINGS, TRIALS, DPGuarantee, dp_guarantee, row
from dosimeter.terminal.console import plain_console


def read_guarantee(name: str, words: Sequence[str], *, rounds: int, delta: float | None, trials: int | None) -> DPGuarantee:
    """The guarantee of a setting whose options are key=value words."""
    options = {key: value for key, value in override({}, words).items() if key != "name"}
    return dp_guarantee(name, rounds=rounds, at_delta=delta, trials=TRIALS if trials is None else trials, **options)


def print_guarantee(found: DPGuarantee, console: Console | None = None) -> None:
    console = console or plain_console()
    console.print(Text(found.title, "bold"))
    table = Table(box=None, padding=(0, 2, 0, 2))
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, overflow="fold", no_wrap=place > 0, justify="right" if place else "left")
    for reading in found.readings:
        table.add_row(*row(reading))
    console.print(table)
    for sentence in found.sentences:
        console.print(Text(f"  {sentence}", "dim"), soft_wrap=True)
