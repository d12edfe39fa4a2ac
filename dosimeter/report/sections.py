"""What follows surface by surface: every method with its numbers beside their nulls, its plot and its pictures."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dosimeter.report import plots
from dosimeter.report.findings import state
from dosimeter.report.numbers import duration, score, score_range, significant
from dosimeter.report.settings import OF_THE_DRAW, Setting, group_by_setting
from dosimeter.report.words import OUTCOMES, higher_is_better, method_idea, metric_name, null_name, shown_name
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.verdicts import SURFACES, gravity, judge_surfaces
from dosimeter.types import Record

PLOTTED = {"labels": ("insacc", "clsacc"), "features": ("feature_error",), "inputs": ("psnr",)}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One metric of one method: its statistics and its nulls'."""

    metric: str
    name: str
    direction: str
    median: str
    middle: str
    interval: str
    nulls: list[tuple[str, str]]  # median and middle half of each null column; empty texts where a null lacks the metric


@dataclass(frozen=True, kw_only=True)
class Picture:
    name: str
    source: str | None  # base64 PNG
    score: str


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    number: int
    pictures: list[Picture]
    beats: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one setting, the runs with different seeds pooled."""

    method: str
    idea: str
    verdict: str
    state: str
    reason: str
    facts: list[str]
    measures: list[Measure]
    plot: plots.SamplePlot | None
    pictures: list[PictureRow]
    pictures_note: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """The methods of one surface in one setting."""

    setting: str
    nulls: list[str]
    spread: bool  # whether any method has more than one value
    rows: list[Row]
    plots: list[plots.StripPlot]
    metrics: list[str]
    sentences: list[str]  # what the arithmetic allows, said before any attack ran
    unavailable: list[tuple[str, str]]  # metrics that could not be computed here, and why


@dataclass(frozen=True, kw_only=True)
class Section:
    surface: str
    tables: list[Table]


def sections(records: Sequence[Record]) -> list[Section]:
    settings = group_by_setting(records)
    return [
        Section(surface=surface, tables=[table for setting in settings if (table := _table(surface, setting))])
        for surface in SURFACES
        if any(record.surface == surface for record in records)
    ]


def _table(surface: str, setting: Setting) -> Table | None:
    found = sorted((record for record in setting.records if record.surface == surface), key=gravity, reverse=True)
    pools = _pool_seeds(found)  # the most telling first
    if not pools:
        return None
    nulls = list(dict.fromkeys(name for pool in pools for record in pool for name in record.nulls))
    scored = [(shown_name(pool[0]), _pooled_metrics(pool), _pooled_nulls(pool)) for pool in pools]
    metric = PLOTTED["inputs"][0]
    scale = plots.sample_scale([(found.get(metric, []), columns) for _, found, columns in scored], metric)
    rows = []
    for pool, (method, found, columns) in zip(pools, scored):
        plot = plots.sample_plot(method, found[metric], columns, metric, scale) if surface == "inputs" and found.get(metric) else None
        rows.append(_row(pool, found, columns, nulls, plot))
    draw = {"labels": plots.label_plot, "features": plots.error_plot}.get(surface)
    strips = [plot for name in PLOTTED[surface] if draw and (plot := draw(scored, name))]
    sentences = dict.fromkeys(str(text) for pool in pools for record in pool for text in record.details.get("identifiability") or [])
    unavailable = {str(name): str(why) for pool in pools for r in pool for name, why in (r.details.get("unavailable") or {}).items()}
    return Table(
        setting=setting.name,
        nulls=[null_name(name) for name in nulls],
        spread=any(measure.middle for row in rows for measure in row.measures),
        rows=rows,
        plots=strips,
        metrics=list(dict.fromkeys(measure.name for row in rows for measure in row.measures)),
        sentences=list(sentences),
        unavailable=[(metric_name(name), reason) for name, reason in unavailable.items()],
    )


def _row(pool: list[Record], found: dict[str, list], columns: dict[str, dict[str, list]], nulls: list[str], plot) -> Row:
    first = pool[0]
    judged = next(iter(judge_surfaces(pool)), None)  # none where every run crashed
    pictures = [_picture_row(i, picture, first) for i, picture in enumerate(first.pictures)]
    note = f"seed {first.seed} of {len(pool)} seeds" if len(pool) > 1 else ""
    scored = len(first.metrics.get("psnr", []))
    if pictures and scored > len(pictures):
        note = "; ".join(filter(None, [note, f"the first {len(pictures)} of {scored} samples"]))
    return Row(
        method=shown_name(first),
        idea=method_idea(first.surface, first.method),
        verdict=judged.verdict.value if judged else "crashed",
        state=state(judged.verdict) if judged else "not-measured",
        reason=judged.reason if judged else first.reason,
        facts=_facts(pool, found),
        measures=[_measure(metric, values, columns, nulls) for metric, values in found.items() if values],
        plot=plot,
        pictures=pictures,
        pictures_note=note,
    )


def _pool_seeds(records: Sequence[Record]) -> list[list[Record]]:
    """Runs that differ in their draw alone, together."""
    pools: dict[str, list[Record]] = {}
    for record in records:
        identity = json.dumps([record.method, record.threat_model.get("labels"), _without_draw(record.config)], sort_keys=True, default=str)
        pools.setdefault(identity, []).append(record)
    return list(pools.values())


def _without_draw(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_draw(item) for key, item in value.items() if key not in OF_THE_DRAW}
    return [_without_draw(item) for item in value] if isinstance(value, list) else value


def _pooled_metrics(pool: Sequence[Record]) -> dict[str, list]:
    telling = PLOTTED[pool[0].surface]
    present = dict.fromkeys(name for record in pool for name in record.metrics)
    names = [name for name in telling if name in present] + [name for name in present if name not in telling]
    return {name: [value for record in pool for value in record.metrics.get(name, [])] for name in names}


def _pooled_nulls(pool: Sequence[Record]) -> dict[str, dict[str, list]]:
    names = dict.fromkeys(name for record in pool for name in record.nulls)
    pooled: dict[str, dict[str, list]] = {}
    for name in names:
        metrics = dict.fromkeys(metric for record in pool for metric in record.nulls.get(name, {}))
        pooled[name] = {m: [value for record in pool for value in record.nulls.get(name, {}).get(m, [])] for m in metrics}
    return pooled


def _measure(metric: str, values: list, columns: dict[str, dict[str, list]], nulls: list[str]) -> Measure:
    up = higher_is_better(metric)
    summary = summarize(values, up)
    single = summary.count == 1
    cells = []
    for name in nulls:
        null = columns.get(name, {}).get(metric)
        if not null:
            cells.append(("", ""))
            continue
        spread = summarize(null, up)
        middle = score_range(spread.quantiles[1], spread.quantiles[2], metric) if spread.count > 1 else ""
        cells.append((score(spread.median, metric), middle))
    return Measure(
        metric=metric,
        name=metric_name(metric),
        direction="higher means more leaked" if up else "lower means more leaked",
        median=score(summary.median, metric),
        middle="" if single else score_range(summary.quantiles[1], summary.quantiles[2], metric),
        interval="" if single else score_range(summary.low, summary.high, metric),
        nulls=cells,
    )


def _facts(pool: Sequence[Record], found: dict[str, list]) -> list[str]:
    """What is said of a method beside its numbers."""
    first = pool[0]
    outcomes = dict.fromkeys(
        f"{record.outcome}: {OUTCOMES[record.outcome]}" if record.outcome in OUTCOMES else record.outcome for record in pool
    )
    facts = list(outcomes)
    if first.surface != "labels" and found:
        counted = next(iter(found.values()))
        misses = sum(value is None for value in counted)
        facts.append(f"{len(counted)} samples" + (f", {misses} missed" if misses else ""))
    if len(pool) > 1:
        facts.append(f"{len(pool)} seeds")
    facts.extend(str(note) for note in first.details.get("counters") or [])
    if first.surface != "labels" and found and first.threat_model.get("labels"):
        facts.append(f"labels {first.threat_model['labels']}")
    if any(record.seconds for record in pool):
        facts.append(duration(sum(record.seconds for record in pool)))
    for record in pool:
        facts.extend(fact for fact in _details(record) if fact not in facts)
    return facts


def _details(record: Record) -> list[str]:
    details, facts = record.details, []
    certified, false = details.get("certified"), details.get("false_certificates")
    if isinstance(certified, bool):
        facts.append("certified: proved from the gradient alone" if certified else "not certified")
    elif isinstance(certified, int):
        facts.append(f"{certified} certified from the gradient alone" + (f", {false} of them wrongly" if false else ""))
    if isinstance(details.get("confidence"), (int, float)):
        facts.append(f"the method’s own confidence {100 * details['confidence']:.1f}\u202f%")
    if details.get("batch_size") is not None:
        facts.append(f"batch size {details['batch_size']} read off the gradient")
    if details.get("complete") is not None:
        facts.append("the whole gradient is accounted for" if details["complete"] else "a part of the gradient is not accounted for")
    reached, truth = details.get("objective"), details.get("objective_at_truth")
    if isinstance(reached, (int, float)) and isinstance(truth, (int, float)):
        hint = ": the attack stopped short, so it was under-optimised" if truth < reached else ""
        facts.append(f"objective {significant(reached)}, at the truth {significant(truth)}{hint}")
    if details.get("message"):
        facts.append(str(details["message"]))
    return facts


def _picture_row(i: int, picture: dict[str, Any], record: Record) -> PictureRow:
    nulls = {name: columns.get("psnr", []) for name, columns in record.nulls.items()}
    rivals = [column[i] for column in nulls.values() if i < len(column)]
    shown = [
        Picture(name="truth", source=_png(picture.get("truth")), score=""),
        Picture(name="recovered", source=_png(picture.get("recovered")), score=score(picture.get("psnr"), "psnr")),
    ]
    order = list(record.nulls)
    by_null = sorted((picture.get("nulls") or {}).items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    for name, source in by_null:
        column = nulls.get(name, [])
        shown.append(Picture(name=null_name(name), source=_png(source), score=score(column[i], "psnr") if i < len(column) else ""))
    return PictureRow(number=i + 1, pictures=shown, beats=plots.beats_nulls(picture.get("psnr"), rivals, "psnr"))


def _png(text: Any) -> str | None:
    """The text if it is a PNG in base64; records may come from anywhere."""
    try:
        return text if isinstance(text, str) and base64.b64decode(text, validate=True).startswith(PNG_SIGNATURE) else None
    except (binascii.Error, ValueError):
        return None
