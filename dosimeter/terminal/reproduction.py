"""The papers' tables, published beside measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dosimeter.runs.reproduction.comparing import Agreement
from dosimeter.runs.reproduction.inventory import ItemStatus, Paper, Status, count_by_status
from dosimeter.runs.reproduction.reproduce import Reproduction
from dosimeter.terminal.console import plain_console
from dosimeter.terminal.record import short

AGREEMENT_COLOURS = {Agreement.REPRODUCED: "green", Agreement.UNPUBLISHED: "dim", Agreement.SKIPPED: "dim"}  # others: yellow
AGREES = (Status.DONE, Status.QUICK, Status.PARTLY)
STATUS_COLOURS = dict.fromkeys(AGREES, "green") | {Status.SHORT: "yellow", Status.NOT_YET: "red"}  # others: dim
UNBOUNDED_WIDTH = 10_000  # characters that no table's line has


def print_tables(tables: list[dict[str, str]]) -> None:
    """Every table that can be carried out, by the key that names it."""
    console = plain_console()
    for table in tables:
        console.print(Text.assemble((table["table"], "bold"), f"  {table['title']}"), soft_wrap=True)
        console.print(Text(f"      {table['source']}", "dim"), soft_wrap=True)


def print_status(paper: Paper, found: list[ItemStatus]) -> None:
    """Every item of a paper with its status, the counts behind it and why it is short; then the counts of the paper."""
    console = plain_console()
    console.print(Text.assemble((f"{paper.key}: {paper.title}", "bold")), soft_wrap=True)
    for item in found:
        counts = [
            f"{number} {word}" for number, word in ((item.reproduced, "agree"), (item.exceeded, "exceeded"), (item.fell_short, "short"))
        ]
        rows = f"; {item.measured_rows} of {item.rows} rows" if item.measured_rows < item.rows else ""
        measured = f" ({', '.join(counts)}{rows}; {item.profile} profile)" if item.profile else ""
        status = (item.status.value, STATUS_COLOURS.get(item.status, "dim"))
        console.print(Text.assemble(f"  {item.item}: ", status, f"{measured}: {item.shows}"), soft_wrap=True)
        for reason in item.reasons:
            console.print(Text(f"      {reason}", "dim"), soft_wrap=True)
    counted = ", ".join(f"{number} {word}" for word, number in count_by_status(found).items() if number)
    console.print(Text(f"  {len(found)} items: {counted}", "bold"), soft_wrap=True)


def print_reproduction(result: Reproduction) -> None:
    """Published beside measured, each with its verdict; then the laws, and every departure from the paper."""
    console = plain_console()
    console.print(Text.assemble((f"{result.table}: {result.title}", "bold"), f" ({result.profile} profile)"), soft_wrap=True)
    console.print(Text(f"{result.source}. {result.published}.", "dim"), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "quantity"):
        table.add_column(heading, overflow="fold")
    for heading in ("published", "measured", "batches"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    row = None
    for cell in result.cells:
        if cell.row != row:
            row = cell.row
            table.add_row(Text(row, "bold"))
        spread = "" if cell.standard_error is None else f" ± {cell.standard_error:.2g}"
        said = "" if cell.verdict is Agreement.UNPUBLISHED else cell.verdict.value
        verdict = Text(": ".join(filter(None, (said, cell.reason))), AGREEMENT_COLOURS.get(cell.verdict, "yellow"))
        table.add_row(f"  {cell.column}", cell.quantity, short(cell.published), short(cell.measured) + spread, str(cell.trials), verdict)
    _print_whole(console, table)
    for law in result.laws:
        verdict = law.verdict.value + (f": {law.reason}" if law.reason else "")
        numbers = ", ".join(short(value) for value in law.numbers.values())
        console.print(
            Text.assemble(
                f"{law.says} ({law.column}, {law.quantity}: {numbers}): ", (verdict, AGREEMENT_COLOURS.get(law.verdict, "yellow"))
            ),
            soft_wrap=True,
        )
    for model, accuracy in result.accuracies.items():
        console.print(Text(f"test accuracy {accuracy:.3f}: {model}", "dim"), soft_wrap=True)
    for departure in (*result.departures, *(f"{row}: {said}" for row, sentences in result.row_departures.items() for said in sentences)):
        console.print(Text(f"departure: {departure}", "cyan"), soft_wrap=True)


def _print_whole(console: Console, table: Table) -> None:
    """Print a table without truncation: folded on a terminal, at full width into a pipe or a file."""
    if not console.is_terminal:
        console = plain_console(width=console.measure(table, options=console.options.update(max_width=UNBOUNDED_WIDTH)).maximum)
    console.print(table)
