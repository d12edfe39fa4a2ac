"""The page itself: records in, one self-contained HTML file out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dosimeter.artefacts import refuse_link, write_text
from dosimeter.numbers import duration, percent, times
from dosimeter.records import FILE_NAME as RECORDS_NAME
from dosimeter.records import read_cells, read_records
from dosimeter.report import words
from dosimeter.report.decision import GRID, in_plain_words, what_now, what_to_do
from dosimeter.report.evidence import exhibits
from dosimeter.report.findings import LEAK_STATES, findings, headline_parts, verdict_matrix, warnings
from dosimeter.report.limits import ceiling_text
from dosimeter.report.promises import promises
from dosimeter.report.sections import sections
from dosimeter.report.settings import threat_model_lines
from dosimeter.report.sweep import has_leaked, leaks_by_surface, next_step, panels
from dosimeter.report.timeline import timelines
from dosimeter.report.tradeoff import tradeoff
from dosimeter.surfaces.surface import surface_names, surfaces
from dosimeter.surfaces.verdicts import UTILITY, Verdict
from dosimeter.types import Outcome, Record
from dosimeter.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

FILE_NAME = "report.html"
GENERATOR_MARK = b'<meta name="generator" content="Dosimeter '  # in the head of every report
BYTES_BEFORE_MARK = 4096  # at most


def render(records: Sequence[Record], title: str | None = None) -> str:
    """A whole HTML page that loads nothing; every string of a record is escaped."""
    _check(records)
    costs = tradeoff(records)
    records = [record for record in records if record.surface != UTILITY]
    found = findings(records)
    shown = exhibits(found, records)
    unseen = [finding for finding in found if finding.surface not in {exhibit.finding.surface for exhibit in shown}]
    matrix = verdict_matrix(records)
    metrics = dict.fromkeys(metric for record in records for metric in record.metrics)
    nulls = dict.fromkeys(null for record in records for null in record.nulls)
    null_words = words.null_words()
    return (
        _environment()
        .get_template("template.html")
        .render(
            title=title or _title(records),
            headline=headline_parts(found),
            findings=found,
            exhibits=shown,
            unseen=sorted(unseen, key=lambda finding: finding.state not in LEAK_STATES),
            plain_words=in_plain_words(found, records),
            advice=_with_command(what_to_do(found, records, costs)),
            next_step=_with_command(what_now(found, costs)),
            matrix=matrix if len(matrix) > 1 and costs is None else [],
            surfaces=[surface for surface in surfaces() if surface.name in {record.surface for record in records}],
            tradeoff=costs,
            timelines=timelines(records),
            promises=promises(records),
            percent=percent,
            ceiling=ceiling_text,
            times=times,
            threat_model=threat_model_lines(records),
            sections=sections(records),
            warnings=warnings(records),
            metric_words=[(words.metric_name(metric), words.metric_idea(metric)) for metric in metrics if words.metric_idea(metric)],
            null_words=[null_words[null] for null in nulls if null in null_words],
            records=[(record, _as_json(record)) for record in records],
            seeds=list(dict.fromkeys(record.seed for record in records)),
            versions=list(dict.fromkeys((name, version) for record in records for name, version in record.versions.items())),
            hashes=_hashes(records),
            total=duration(sum(record.seconds for record in records)),
            version=__version__,
        )
    )


def write_report(folder: str | Path) -> Path:
    """Write `report.html` from the folder's records, completely or not at all."""
    path = check_report_place(folder)
    cells = {} if (Path(folder) / RECORDS_NAME).exists() else read_cells(folder)
    write_text(path, render_sweep(cells) if cells else render(read_records(folder)))
    return path


def render_sweep(cells: Mapping[str, Record]) -> str:
    """The page of a sweep, from its records by where they lie."""
    _check(list(cells.values()))
    records = list(cells.values())
    crashed = sum(record.outcome == Outcome.CRASHED for record in records)
    leaked = sum(map(has_leaked, records))
    told = {"count": len(cells), "leaked": leaked, "crashed": crashed, "by_surface": leaks_by_surface(records)}
    then = _with_command(next_step(records))
    return _environment().get_template("sweep.html").render(panels=panels(cells), next_step=then, version=__version__, **told)


def check_report_place(folder: str | Path) -> Path:
    """The path of a folder's report. Another file of this name, which Dosimeter did not write, is refused."""
    path = Path(folder) / FILE_NAME
    refuse_link(path)
    if path.exists() and (not path.is_file() or GENERATOR_MARK not in path.open("rb").read(BYTES_BEFORE_MARK)):
        raise ValueError(f"{path}: was not written by Dosimeter and is not overwritten; move it or choose another folder")
    return path


def _check(records: Sequence[Record]) -> None:
    if not records:
        raise ValueError("report: expected at least one record, got none; `dosimeter audit` writes them")
    known = [verdict.value for verdict in Verdict]
    if all(record.surface == UTILITY for record in records):
        raise ValueError("report: expected a record of a method, got only what the defenses cost")
    for record in records:
        if record.surface == UTILITY:
            continue
        if record.surface not in surface_names():
            known_surfaces = ", ".join(surface_names())
            raise ValueError(f"report: record {record.key!r}: surface: expected one of {known_surfaces}, got {record.surface!r}")
        if record.verdict not in known:
            raise ValueError(f"report: record {record.key!r}: verdict: expected one of {', '.join(known)}, got {record.verdict!r}")


def _title(records: Sequence[Record]) -> str:
    """Model and data, where all records share them."""
    for key in ("model", "data"):
        if len({str(record.threat_model.get(key)) for record in records}) > 1:
            return "Audit of a shared gradient"
    known = [str(records[0].threat_model[key]) for key in ("model", "data") if records[0].threat_model.get(key)]
    return f"Audit of {' on '.join(known)}" if known else "Audit of a shared gradient"


def _hashes(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Fingerprints of the model and of the private batch, which identify what was audited."""
    names = {"model_hash": "model", "batch_hash": "batch"}
    return list(dict.fromkeys((names[key], str(r.threat_model[key])) for key in names for r in records if r.threat_model.get(key)))


def _with_command(text: str) -> Markup:
    """The text, with the command in it set as a command."""
    from markupsafe import Markup, escape

    return escape(text).replace(GRID, Markup("<code>{}</code>").format(GRID))


def _as_json(record: Record) -> str:
    return json.dumps({"config": record.config, "versions": record.versions}, indent=2, ensure_ascii=False, default=str)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent
    return Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
