"""An audit: the verdict on every surface with its methods, or with the defenses of a grid."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dosimeter.numbers import percent, times
from dosimeter.registry import METRICS
from dosimeter.report.limits import ceiling_text, limits_sentence
from dosimeter.report.promises import promises
from dosimeter.report.tradeoff import Tradeoff, tradeoff
from dosimeter.report.words import display_name
from dosimeter.runs.audit import Audit
from dosimeter.surfaces.judging import gravity
from dosimeter.surfaces.limits import limits_of
from dosimeter.surfaces.surface import surface_named, surface_names
from dosimeter.surfaces.verdicts import LEAKS, Verdict, premises_beside, verdict_of
from dosimeter.terminal.console import plain_console
from dosimeter.terminal.record import COLOURS, short, summary_of, verdict_line
from dosimeter.types import Record


def print_audit(result: Audit, report: Path) -> None:
    """The verdict on every surface with its methods, or with the cells of a grid of defenses; then the report's path."""
    console = plain_console()
    costs = tradeoff(result.records)
    for verdict in result.verdicts:
        console.print(verdict_line(verdict.surface, verdict.verdict, verdict.method, verdict.reason))
        records = [record for record in result.records if record.surface == verdict.surface]
        if proof := premises_beside(records, verdict.reason):
            console.print(Text(f"{proof[0]} ({display_name(proof[1])})", "dim"))
        if costs is None:
            limits = limits_of(surface_named(verdict.surface), records)
            if limits and limits.tells:
                console.print(Text(limits_sentence(limits), "dim"))
            _print_methods(console, verdict.surface, records)
    judged = {verdict.surface for verdict in result.verdicts}
    for record in result.records:
        if record.surface in surface_names() and record.surface not in judged:
            console.print(verdict_line(record.surface, Verdict.NOT_MEASURED, display_name(record), record.reason))
    for promise in promises(result.records):
        said = f"stated {promise.stated}, proved {promise.proved}, a trial shows {promise.trial}"
        console.print(Text.assemble((f"ε of {promise.whom}: ", "bold"), f"{said} ({promise.reason})"))
    if costs is not None:
        _print_tradeoff(console, costs)
    console.print(f"report: {report}", soft_wrap=True)


def _print_methods(console: Console, surface: str, records: list[Record]) -> None:
    """The methods of one surface, the gravest finding first."""
    table = Table(box=None, padding=(0, 2, 0, 2))
    table.add_column("method", no_wrap=True)
    scored = any(record.metrics for record in records)
    metric = surface_named(surface).headline_in({name: values for record in records for name, values in record.metrics.items()})
    for heading in (*((metric, "best null") if scored else ()), "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for record in sorted(records, key=gravity, reverse=True):
        remark = record.verdict if verdict_of(record) in LEAKS else f"{verdict_of(record)}: {record.reason}"
        for null, why in record.details.get("refused_nulls", {}).items():
            remark += f"; without the null {null!r}: {why}"
        figures = _figures(record) if scored else ()
        table.add_row(display_name(record), *figures, f"{record.seconds:.1f}", Text(remark, COLOURS[verdict_of(record)]))
    console.print(table)
    console.print()


def _print_tradeoff(console: Console, found: Tradeoff) -> None:
    """One row a cell: how much of each surface leaks behind its defenses, and what they cost."""
    console.print()
    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("leaked behind, and cost", min_width=24)
    measured = [surface for surface in surface_names() if any(surface in cell.leaks for cell in found.cells)]
    for heading in (*measured, "ceiling", "accuracy", "bytes", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in found.cells:
        leaks = [percent(cell.leaks.get(surface)) for surface in measured]
        costs = [ceiling_text(cell.highest_ceiling, unknown="–"), percent(cell.accuracy), times(cell.bytes_ratio), times(cell.time_ratio)]
        remark = cell.note or ", ".join(cell.promises)
        table.add_row(f"{cell.name}: {remark}" if remark else cell.name, *leaks, *costs)
    console.print(table)
    console.print(Text.assemble(("\nwhat to switch on: ", "bold"), found.advice))
    console.print()


def _figures(record: Record) -> tuple[str, str]:
    """The median of the surface's headline, and the best of its nulls' medians."""
    metric = surface_named(record.surface).headline_in(record.metrics)
    if metric not in record.metrics:
        return "", ""
    medians = [summary_of(metric, columns[metric]).median for columns in record.nulls.values() if metric in columns]
    best = (max if METRICS.build(metric).higher_is_better else min)((m for m in medians if m is not None), default=None)
    return short(summary_of(metric, record.metrics[metric]).median), short(best)
