"""What a person sees in the terminal: a progress bar on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from dosimeter.progress import Listener
from dosimeter.registry import METRICS
from dosimeter.report.numbers import percent, times
from dosimeter.report.tradeoff import Tradeoff, tradeoff
from dosimeter.report.words import shown_name
from dosimeter.runs.audit import Audit, Progress
from dosimeter.runs.reproduction.comparing import Agreement
from dosimeter.runs.reproduction.reproduce import Reproduction
from dosimeter.surfaces.intervals import Summary, summarize
from dosimeter.surfaces.verdicts import SURFACES, Verdict, gravity
from dosimeter.types import Record

COLOURS = {Verdict.LEAKED: "bold red", Verdict.NOT_SHOWN: "yellow", Verdict.IMPOSSIBLE: "dim", Verdict.NOT_MEASURED: "yellow"}
AGREEMENT_COLOURS = {Agreement.REPRODUCED: "green", Agreement.UNPUBLISHED: "dim", Agreement.SKIPPED: "dim"}  # others: yellow
UNBOUNDED = 10_000  # characters that no table's line has
SHOWN = {"labels": "insacc", "features": "feature_error", "inputs": "psnr"}  # the metric that stands for a surface


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


def print_audit(result: Audit, report: Path) -> None:
    """The verdict on every surface, with the methods or, of a grid of defenses, with the defenses; then where the report lies."""
    console = Console()
    costs = tradeoff(result.records)
    for verdict in result.verdicts:
        console.print(_headline(verdict.surface, verdict.verdict, verdict.method, verdict.reason))
        if costs is None:
            _print_methods(console, [record for record in result.records if record.surface == verdict.surface], SHOWN[verdict.surface])
    judged = {verdict.surface for verdict in result.verdicts}
    for record in result.records:
        if record.surface in SURFACES and record.surface not in judged:
            console.print(_headline(record.surface, Verdict.NOT_MEASURED, shown_name(record), record.reason))
    if costs is not None:
        _print_tradeoff(console, costs)
    console.print(f"report: {report}", soft_wrap=True)


def _print_methods(console: Console, records: list[Record], metric: str) -> None:
    """The methods of one surface, the most telling first."""
    table = Table(box=None, padding=(0, 2, 0, 2))
    table.add_column("method", no_wrap=True)
    for heading in (metric, "best null", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for record in sorted(records, key=gravity, reverse=True):
        remark = record.reason if not record.metrics else record.verdict
        table.add_row(shown_name(record), *_figures(record), f"{record.seconds:.1f}", Text(remark, COLOURS[Verdict(record.verdict)]))
    console.print(table)
    console.print()


def _print_tradeoff(console: Console, found: Tradeoff) -> None:
    """A row a defense: how much of each surface leaks behind it, and what it costs."""
    console.print()
    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("leaked behind, and cost", min_width=24)
    for heading in (*SURFACES, "accuracy", "bytes", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in found.cells:
        leaks = [percent(cell.leaks.get(surface)) for surface in SURFACES]
        costs = [percent(cell.accuracy), times(cell.bytes_ratio), times(cell.time_ratio)]
        remark = cell.note or ", ".join(cell.promises)
        table.add_row(f"{cell.name}: {remark}" if remark else cell.name, *leaks, *costs)
    console.print(table)
    console.print(Text.assemble(("\nwhat to switch on: ", "bold"), found.advice))
    console.print()


def print_record(record: Record) -> None:
    console = Console()
    console.print(_headline(record.surface, Verdict(record.verdict), record.method, record.reason))
    table = Table()
    for heading in ("metric", "median", "10 %", "90 %", *record.nulls):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for metric, values in record.metrics.items():
        summary = _summary(metric, values)
        nulls = [_number(_summary(metric, columns[metric]).median) if metric in columns else "" for columns in record.nulls.values()]
        table.add_row(metric, _number(summary.median), _number(summary.quantiles[0]), _number(summary.quantiles[3]), *nulls)
    if record.metrics:
        console.print(table)
    for warning in record.warnings:
        console.print(Text(f"warning: {warning}", "yellow"))


def _headline(surface: str, verdict: Verdict, method: str, reason: str) -> Text:
    return Text.assemble((f"{surface}: {verdict}", COLOURS[verdict]), f" ({method}): {reason}")


def print_catalogue(entries: list[dict[str, Any]]) -> None:
    console = Console()
    kind = None
    for entry in entries:
        if entry["kind"] != kind:
            kind = entry["kind"]
            console.print(Text(f"\n{kind}", "bold underline"))
        console.print(Text.assemble(("  " + entry["name"], "bold"), f"  {entry['idea']}"), soft_wrap=True)
        if entry["needs"]:
            console.print(Text(f"      needs: {', '.join(entry['needs'])}", "cyan"), soft_wrap=True)
        for said, verb in (("promise", "promises"), ("breaks", "breaks")):
            if said in entry:
                console.print(Text(f"      {verb}: {entry[said]}", "cyan"), soft_wrap=True)
        for option in entry["options"]:
            default = "required" if option["required"] else f"default {option['default']}"
            console.print(Text(f"      {option['name']}: {option['type']}, {default}", "dim"), soft_wrap=True)


def print_tables(tables: list[dict[str, str]]) -> None:
    """Every table that can be carried out, by the key that names it."""
    console = Console()
    for table in tables:
        console.print(Text.assemble((table["table"], "bold"), f"  {table['title']}"), soft_wrap=True)
        console.print(Text(f"      {table['source']}", "dim"), soft_wrap=True)


def print_reproduction(result: Reproduction) -> None:
    """Published beside measured, each with its verdict; then the laws, and every departure from the paper."""
    console = Console()
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
        table.add_row(
            f"  {cell.column}", cell.quantity, _number(cell.published), _number(cell.measured) + spread, str(cell.trials), verdict
        )
    _print_whole(console, table)
    for law in result.laws:
        verdict = law.verdict.value + (f": {law.reason}" if law.reason else "")
        numbers = ", ".join(_number(value) for value in law.numbers.values())
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
    """A table of which nothing is cut: folded on a terminal, as wide as it is where a pipe or a file reads it."""
    if not console.is_terminal:
        console = Console(width=console.measure(table, options=console.options.update(max_width=UNBOUNDED)).maximum)
    console.print(table)


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


def _figures(record: Record) -> tuple[str, str]:
    metric = SHOWN[record.surface]
    if metric not in record.metrics:
        return "", ""
    medians = [_summary(metric, columns[metric]).median for columns in record.nulls.values() if metric in columns]
    best = (max if METRICS.build(metric).higher_is_better else min)((m for m in medians if m is not None), default=None)
    return _number(_summary(metric, record.metrics[metric]).median), _number(best)


def _summary(metric: str, values: list[float | None]) -> Summary:
    return summarize(values, METRICS.build(metric).higher_is_better)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
