"""Evidence on the page: private beside recovered, as pictures, tables and texts. Records may come from anywhere, so all is checked."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dosimeter.report.findings import LEAK_STATES, Finding
from dosimeter.report.scores import score
from dosimeter.report.words import higher_is_better, metric_name, null_name, unit
from dosimeter.surfaces.judging import gravity
from dosimeter.surfaces.surface import Surface, surface_named
from dosimeter.types import Outcome, Record

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PAIR = ("private", "recovered")
MOST_SHOWN = 4  # pieces of evidence of a surface at the top of the page


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One of the things that stand beside one another: the private one, the recovered one, or a null."""

    name: str
    source: str | None  # base64 PNG, or text; None where there is none
    score: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of evidence: of one sample, or of the batch."""

    kind: str  # image, tiles, table or text
    title: str
    beats: bool
    shown: list[Shown]  # for a table: empty
    rows: list[tuple[str, list[str]]]  # of a table: the row's name, and its value in each column
    columns: list[str]  # of a table

    @property
    def pair(self) -> list[Shown]:
        """Private and recovered, without the nulls."""
        return [thing for thing in self.shown if thing.name in PAIR]

    def without_nulls(self) -> Piece:
        """A table with the columns private and recovered alone."""
        kept = [at for at, name in enumerate(self.columns) if name in PAIR]
        return replace(
            self, columns=[self.columns[at] for at in kept], rows=[(row, [values[at] for at in kept]) for row, values in self.rows]
        )


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """What the top of the page shows of one surface: the verdict, and the evidence of the record that shows most."""

    finding: Finding
    pieces: list[Piece]
    note: str  # which of the samples are shown
    legend: str  # the same of the first exhibit, which shows several


def exhibits(found: Sequence[Finding], records: Sequence[Record]) -> list[Exhibit]:
    """One exhibit a surface with evidence: what leaked first, and among them what is closest to the sample itself."""
    shown = [exhibit for finding in found if (exhibit := _exhibit(finding, records))]
    return _premises_once(
        sorted(shown, key=lambda one: (one.finding.state not in LEAK_STATES, -surface_named(one.finding.surface).position))
    )


def _premises_once(shown: Sequence[Exhibit]) -> list[Exhibit]:
    """The exhibits, where the premises of a proof that an exhibit before them has are named after its surface."""
    first: dict[str, str] = {}
    once = []
    for one in shown:
        surface = first.setdefault(one.finding.premises, one.finding.surface)
        same = replace(one.finding, premises=f"what is proved takes for granted the same as for {surface}")
        once.append(replace(one, finding=same) if one.finding.premises and surface != one.finding.surface else one)
    return once


def pieces_of(record: Record) -> list[Piece]:
    """All evidence of a record, in the truth's order."""
    surface = surface_named(record.surface)
    return [piece_of(i, shown, surface, record) for i, shown in enumerate(record.evidence)]


def _exhibit(finding: Finding, records: Sequence[Record]) -> Exhibit | None:
    told = [record for record in records if record.surface == finding.surface and record.outcome != Outcome.CRASHED]
    telling = max(told, key=gravity, default=None)
    if telling is None or not telling.evidence:
        return None
    pieces = pieces_of(telling)
    worst = sorted(range(len(pieces)), key=lambda i: (not pieces[i].beats, _rank(i, telling)))[:MOST_SHOWN]
    scored = len(telling.metrics.get(surface_named(finding.surface).evidence_metric(telling.metrics), [])) or len(pieces)
    per_sample = telling.evidence[0].get("sample") is not None or len(pieces) > 1
    most = "what leaked most" if finding.state in LEAK_STATES else "what came closest"
    note = f"{most} of {scored} samples" if telling.metrics else f"the first of {scored} samples"
    whole = f"all {scored} samples, {most} first" if telling.metrics and len(worst) == scored else note
    framed = "; in a red frame what comes closer than any guess without the update" if any(pieces[i].beats for i in worst) else ""
    shown, told_of = [pieces[i].without_nulls() for i in worst], per_sample and scored > 1
    return Exhibit(finding=finding, pieces=shown, note=note if told_of else "", legend=whole + framed if told_of else "")


def _rank(i: int, record: Record) -> float:
    """The order of evidence by what the update adds for the eye: how far the score is beyond the best null's.

    The score is the surface's own for the eye where it was measured, else the headline. A flat picture that any guess resembles comes last.
    """
    shown, surface = record.evidence[i], surface_named(record.surface)
    if shown.get("recovered") is None:
        return math.inf
    metric = surface.visible if surface.visible in record.metrics else surface.evidence_metric(record.metrics)
    values = record.metrics.get(metric, [])
    at = i if shown.get("sample") is None else shown["sample"]
    value = values[at] if at < len(values) else None
    if value is None:
        return math.inf if record.metrics else 0.0
    sign = 1.0 if higher_is_better(metric) else -1.0
    rivals = [sign * rival for rival in _rivals(i, record, metric).values() if rival is not None]
    return max(rivals, default=0.0) - sign * value


def _rivals(i: int, record: Record, metric: str) -> dict[str, float | None]:
    """The score of each null of one piece of evidence."""
    sample = record.evidence[i].get("sample")
    at = i if sample is None else sample
    columns = {name: values.get(metric, []) for name, values in record.nulls.items()}
    return {name: column[at] for name, column in columns.items() if at < len(column)}


def piece_of(i: int, shown: dict[str, Any], surface: Surface[Any], record: Record | None = None) -> Piece:
    """One piece of evidence for the page; without a record, of an estimate that nobody scored."""
    metrics = {} if record is None else record.metrics
    metric = surface.evidence_metric(metrics)
    rivals = {} if record is None else _rivals(i, record, metric)
    order = list(rivals)
    nulls = sorted((shown.get("nulls") or {}).items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    known = shown.get("score") is not None or (shown.get("recovered") is None and metric in metrics)  # else nothing was scored
    named = [
        ("private", shown.get("private"), ""),
        ("recovered", shown.get("recovered"), _score(shown.get("score"), metric) if known else ""),
    ]
    if shown.get("private") is None and not metrics:
        named = named[1:]  # no truth was at hand
    named += [(null_name(name), thing, _score(rivals[name], metric) if name in rivals else "") for name, thing in nulls]
    kind = str(shown.get("kind"))
    sample = shown.get("sample")
    tables = [(name, thing) for name, thing, _ in named if isinstance(thing, dict)] if kind == "table" else []
    names = dict.fromkeys(row for _, table in tables for row in table)
    return Piece(
        kind=kind,
        title=str(shown.get("caption") or "") or f"Sample {(i if sample is None else sample) + 1}",
        beats=known and surface.rule_of(metric)(shown.get("score"), list(rivals.values())),
        shown=[Shown(name=name, source=_checked(kind, thing), score=value) for name, thing, value in named] if kind != "table" else [],
        rows=[(row, [str(table.get(row, "–")) for _, table in tables]) for row in names],
        columns=[name for name, _ in tables],
    )


def _score(value: float | None, metric: str) -> str:
    """A score with its unit, or else with its metric's name before it."""
    text = score(value, metric)
    return text if unit(metric) or value is None else f"{metric_name(metric)} {text}"


def _checked(kind: str, thing: Any) -> str | None:
    """A text as it is; a picture if it is a PNG in base64."""
    if not isinstance(thing, str) or kind == "text":
        return thing if isinstance(thing, str) else None
    try:
        return thing if base64.b64decode(thing, validate=True).startswith(PNG_SIGNATURE) else None
    except (binascii.Error, ValueError):
        return None
