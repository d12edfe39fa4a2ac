"""What a notebook shows of an audit and of an estimate: the verdicts, and private beside recovered, in the cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from dosimeter.report.evidence import MOST_SHOWN, Piece, exhibits, piece_of
from dosimeter.report.findings import findings, headline
from dosimeter.surfaces.surface import surface_of
from dosimeter.surfaces.verdicts import UTILITY
from dosimeter.types import Estimate, Outcome, Record

PICTURE = "height:96px;image-rendering:pixelated;display:block"
FIGURE = "display:inline-block;margin:0 8px 8px 0;vertical-align:top;font-size:85%"


def show_audit(records: Sequence[Record]) -> str:
    """The headline, the evidence of every surface, and a table of the verdicts."""
    records = [record for record in records if record.surface != UTILITY]
    if not records:
        return "<p>an audit without records</p>"
    found = findings(records)
    parts = [f"<p><b>{escape(headline(found))}</b></p>"]
    for exhibit in exhibits(found, records):
        title = f"{exhibit.finding.surface}: {exhibit.finding.verdict}"
        parts.append(f"<div><p style='margin:4px 0'>{escape(title)}</p>{''.join(map(_show, exhibit.pieces))}</div>")
    rows = "".join(
        f"<tr><td>{escape(f.surface)}</td><td>{escape(f.verdict)}</td><td>{escape(f.method)}</td><td>{escape(f.reason)}</td></tr>"
        for f in found
    )
    return f"{''.join(parts)}<table><tr><th>surface</th><th>verdict</th><th>method</th><th>why</th></tr>{rows}</table>"


def show_estimate(found: Estimate) -> str:
    """What was recovered, and how the method ended."""
    surface = surface_of(found)
    said = f"{type(found).__name__}: {found.outcome.value}" + (f", {found.message}" if found.message else "")
    if found.outcome in (Outcome.NOT_ATTEMPTED, Outcome.IMPOSSIBLE, Outcome.CRASHED):
        return f"<p>{escape(said)}</p>"
    evidence = [asdict(shown) for shown in surface.evidence(found)[:MOST_SHOWN]]
    pieces = [piece_of(i, shown, surface) for i, shown in enumerate(evidence)]
    return f"<p>{escape(said)}</p><div>{''.join(map(_show, pieces))}</div>"


def _show(piece: Piece) -> str:
    title = f"<div>{escape(piece.title)}</div>"
    if piece.kind == "table":
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *piece.columns))
        rows = "".join(f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>" for name, values in piece.rows)
        return f"<div style='{FIGURE}'>{title}<table><tr>{head}</tr>{rows}</table></div>"
    things = "".join(
        f"<div style='{FIGURE}'>{_thing(piece.kind, thing.source)}{escape(thing.name)} {escape(thing.score)}</div>" for thing in piece.pair
    )
    return f"<div style='{FIGURE}'>{title}{things}</div>"


def _thing(kind: str, source: str | None) -> str:
    if source is None:
        return "<div>none</div>"
    if kind == "text":
        return f"<pre>{escape(source)}</pre>"
    return f"<img style='{PICTURE}' src='data:image/png;base64,{source}'>"
