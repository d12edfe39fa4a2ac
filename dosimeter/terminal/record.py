"""One record: its verdict and its scores beside their nulls."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from dosimeter.registry import METRICS
from dosimeter.surfaces.intervals import Summary, summarize
from dosimeter.surfaces.verdicts import Verdict, premises_sentence, verdict_of
from dosimeter.terminal.console import plain_console
from dosimeter.types import Record

COLOURS = {
    Verdict.LEAKED: "bold red",
    Verdict.PROVED: "bold red",
    Verdict.UNVERIFIED: "bold magenta",
    Verdict.NOT_SHOWN: "yellow",
    Verdict.NOT_ATTEMPTED: "bold magenta",
    Verdict.IMPOSSIBLE: "dim",
    Verdict.NOT_MEASURED: "yellow",
}


def print_record(record: Record) -> None:
    console = plain_console()
    console.print(verdict_line(record.surface, verdict_of(record), record.method, record.reason))
    if premises := premises_sentence(record):
        console.print(Text(premises, "dim"))
    table = Table()
    for heading in ("metric", "median", "10 %", "90 %", *record.nulls):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for metric, values in record.metrics.items():
        summary = summary_of(metric, values)
        nulls = [short(summary_of(metric, columns[metric]).median) if metric in columns else "" for columns in record.nulls.values()]
        table.add_row(metric, short(summary.median), short(summary.quantiles[0]), short(summary.quantiles[3]), *nulls)
    if record.metrics:
        console.print(table)
    for warning in record.warnings:
        console.print(Text(f"warning: {warning}", "yellow"))


def verdict_line(surface: str, verdict: Verdict, method: str, reason: str) -> Text:
    warning = ", which says nothing about safety" if verdict in (Verdict.NOT_ATTEMPTED, Verdict.UNVERIFIED) else ""
    return Text.assemble((f"{surface}: {verdict}{warning}", COLOURS[verdict]), f" ({method}): {reason}" if method else f": {reason}")


def summary_of(metric: str, values: list[float | None]) -> Summary:
    return summarize(values, METRICS.build(metric).higher_is_better)


def short(value: float | None) -> str:
    """Three significant digits; a dash for a miss."""
    return "–" if value is None else f"{value:.3g}"
