"""The sections of the page, one a surface: every method with its scores beside the nulls, its plot and its evidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dosimeter.numbers import duration
from dosimeter.report import plots
from dosimeter.report.curves import CurvePlot, curve_plot
from dosimeter.report.evidence import Piece, pieces_of
from dosimeter.report.findings import state
from dosimeter.report.limits import LimitsPlot, limits_plot
from dosimeter.report.scores import score, score_range
from dosimeter.report.settings import OF_THE_DRAW, Setting, group_by_setting
from dosimeter.report.words import OUTCOMES, display_name, higher_is_better, method_idea, metric_name, null_name
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.judging import gravity, judge_surfaces
from dosimeter.surfaces.limits import limits_of
from dosimeter.surfaces.surface import Surface, surface_named, surfaces
from dosimeter.surfaces.verdicts import premises_sentence
from dosimeter.types import Record

STRIP_PLOTS = {"shares": plots.share_plot, "errors": plots.error_plot}


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
    curves: CurvePlot | None
    evidence: list[Piece]
    evidence_note: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """The methods of one surface in one setting."""

    setting: str
    nulls: list[str]
    spread: bool  # whether any method has more than one value
    rows: list[Row]
    plots: list[plots.StripPlot]
    limits: LimitsPlot | None  # None where nothing was scored
    metrics: list[str]
    sentences: list[str]  # what the equations determine, whatever the attack
    unavailable: list[tuple[str, str]]  # metrics that could not be computed here, and why


@dataclass(frozen=True, kw_only=True)
class Section:
    surface: str
    description: str
    beaten: str  # what marks a sample that counts as leaked
    tables: list[Table]


def sections(records: Sequence[Record]) -> list[Section]:
    settings = group_by_setting(records)
    return [
        Section(
            surface=surface.name,
            description=surface.description,
            beaten=surface.beaten_words,
            tables=[table for setting in settings if (table := _table(surface, setting))],
        )
        for surface in surfaces()
        if any(record.surface == surface.name for record in records)
    ]


def _table(surface: Surface[Any], setting: Setting) -> Table | None:
    found = sorted((record for record in setting.records if record.surface == surface.name), key=gravity, reverse=True)
    pools = _pool_seeds(found)  # the most telling first
    if not pools:
        return None
    nulls = list(dict.fromkeys(name for pool in pools for record in pool for name in record.nulls))
    scored = [(display_name(pool[0]), _pool_metrics(pool), _pool_nulls(pool)) for pool in pools]
    by_sample = _sample_plots(surface, scored) if surface.plot == "samples" else [None] * len(pools)
    rows = [_row(pool, found, columns, nulls, plot) for pool, (_, found, columns), plot in zip(pools, scored, by_sample)]
    draw = STRIP_PLOTS.get(surface.plot)
    strips = [plot for name in _plotted_metrics(surface) if draw and (plot := draw(scored, name))]
    sentences = dict.fromkeys(str(text) for pool in pools for record in pool for text in record.details.get("identifiability") or [])
    unavailable = {str(name): str(why) for pool in pools for r in pool for name, why in (r.details.get("unavailable") or {}).items()}
    return Table(
        setting=setting.name,
        nulls=[null_name(name) for name in nulls],
        spread=any(measure.middle for row in rows for measure in row.measures),
        rows=rows,
        plots=strips,
        limits=limits_plot(limits) if (limits := limits_of(surface, found)) else None,
        metrics=list(dict.fromkeys(measure.name for row in rows for measure in row.measures)),
        sentences=list(sentences),
        unavailable=[(metric_name(name), reason) for name, reason in unavailable.items()],
    )


def _plotted_metrics(surface: Surface[Any]) -> tuple[str, ...]:
    return (surface.headline, *surface.also_plotted)


def _sample_plots(surface: Surface[Any], scored: Sequence[tuple[str, dict, dict]]) -> list[plots.SamplePlot | None]:
    """One plot a method, all on the same scale; None for a method without scores."""
    metric = surface.headline_in({name: values for _, found, _ in scored for name, values in found.items()})
    scale = plots.sample_scale([(found.get(metric, []), columns) for _, found, columns in scored], metric)
    return [
        plots.sample_plot(method, found[metric], columns, metric, scale, surface.rule_of(metric)) if found.get(metric) else None
        for method, found, columns in scored
    ]


def _row(pool: list[Record], found: dict[str, list], columns: dict[str, dict[str, list]], nulls: list[str], plot) -> Row:
    first = pool[0]
    surface = surface_named(first.surface)
    judged = next(iter(judge_surfaces(pool)), None)  # none where every run crashed
    evidence = pieces_of(first)
    note = f"seed {first.seed} of {len(pool)} seeds" if len(pool) > 1 else ""
    scored = len(first.metrics.get(surface.headline_in(first.metrics), []))
    if evidence and scored > len(evidence):
        note = "; ".join(filter(None, [note, f"the first {len(evidence)} of {scored} samples"]))
    return Row(
        method=display_name(first),
        idea=method_idea(first.surface, first.method),
        verdict=judged.verdict.value if judged else "crashed",
        state=state(judged.verdict) if judged else "not-measured",
        reason=judged.reason if judged else first.reason,
        facts=_facts(pool, found, surface),
        measures=[_measure(metric, values, columns, nulls) for metric, values in found.items() if values],
        plot=plot,
        curves=curve_plot(first.method, surface.curves(first.details)),
        evidence=evidence,
        evidence_note=note,
    )


def _pool_seeds(records: Sequence[Record]) -> list[list[Record]]:
    """Groups of records that differ only in their random draw."""
    pools: dict[str, list[Record]] = {}
    for record in records:
        identity = json.dumps([record.method, record.threat_model.get("labels"), _without_draw(record.config)], sort_keys=True, default=str)
        pools.setdefault(identity, []).append(record)
    return list(pools.values())


def _without_draw(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_draw(item) for key, item in value.items() if key not in OF_THE_DRAW}
    return [_without_draw(item) for item in value] if isinstance(value, list) else value


def _pool_metrics(pool: Sequence[Record]) -> dict[str, list]:
    telling = _plotted_metrics(surface_named(pool[0].surface))
    present = dict.fromkeys(name for record in pool for name in record.metrics)
    names = [name for name in telling if name in present] + [name for name in present if name not in telling]
    return {name: [value for record in pool for value in record.metrics.get(name, [])] for name in names}


def _pool_nulls(pool: Sequence[Record]) -> dict[str, dict[str, list]]:
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


def _facts(pool: Sequence[Record], found: dict[str, list], surface: Surface[Any]) -> list[str]:
    """What the page says about a method beside its numbers."""
    first = pool[0]
    outcomes = dict.fromkeys(
        f"{record.outcome}: {OUTCOMES[record.outcome]}" if record.outcome in OUTCOMES else record.outcome for record in pool
    )
    facts = list(outcomes)
    if surface.per_sample and found:
        counted = next(iter(found.values()))
        misses = sum(value is None for value in counted)
        facts.append(f"{len(counted)} samples" + (f", {misses} missed" if misses else ""))
    if len(pool) > 1:
        facts.append(f"{len(pool)} seeds")
    facts.extend(str(note) for note in first.details.get("counters") or [])
    if first.details.get("spared_nulls"):
        facts.append("no foreign gradient was attacked, since the other nulls are not beaten")
    if surface.takes_labels and found and first.threat_model.get("labels"):
        facts.append(f"labels {first.threat_model['labels']}")
    if any(record.seconds for record in pool):
        facts.append(duration(sum(record.seconds for record in pool)))
    for record in pool:
        more = [str(record.details.get("message") or ""), premises_sentence(record)]
        facts.extend(fact for fact in surface.facts(record.details) + more if fact and fact not in facts)
    return facts
