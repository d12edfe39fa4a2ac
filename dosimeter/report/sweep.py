"""The report of a sweep: for every method a heat map and a curve over the batch sizes, every cell with links to its records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dosimeter.numbers import power_of_ten
from dosimeter.report.decision import GRID
from dosimeter.report.scores import score, score_range
from dosimeter.report.settings import describe_part
from dosimeter.report.words import enumeration, higher_is_better, is_share, metric_name
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.surface import Surface, surface_named, surfaces
from dosimeter.surfaces.verdicts import Verdict, verdict_of
from dosimeter.types import Outcome, Record

HEIGHT = 180.0  # pixels of a curve
LONGEST_NOTE = 110  # letters
UNDEFENDED = "no defense"
MARGIN = 6.0  # per cent left and right of the first and last point


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """The runs of one method in one setting: their median, its interval over the seeds, and how many leaked."""

    median: str
    interval: str
    leaked: int
    runs: int
    shade: float  # share of the runs that leaked
    links: list[tuple[str, str]]  # where a record lies, and its seed
    note: str  # why runs do not count as leaked, or have no number


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    across: float  # per cent
    down: float  # pixels
    top: float
    bottom: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    number: int
    name: str
    points: list[CurvePoint]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One method: a row a setting, a column a batch size."""

    surface: str
    method: str
    metric: str
    columns: list[str]
    rows: list[tuple[str, list[HeatCell | None]]]
    curves: list[Curve]
    ticks: list[tuple[float, str]]  # down in pixels, and the value
    across: list[tuple[float, str]]


def panels(found: Mapping[str, Record]) -> list[Panel]:
    """One panel a method and its options. `found` has the place of each record."""
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for place, record in found.items():
        groups.setdefault((record.surface, _method(record)), {})[place] = record
    order = [surface.name for surface in surfaces()]
    titles = {key: _title(key, groups) for key in groups}
    return [
        _panel(surface_named(surface), titles[surface, method], groups[surface, method])
        for surface, method in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    ]


def leaks_by_surface(records: Sequence[Record]) -> str:
    """How many runs of each surface leaked, as one list."""
    parts = []
    for surface in surfaces():
        own = [record for record in records if record.surface == surface.name]
        leaked = sum(has_leaked(record) for record in own)
        parts += [f"{surface.name} in {leaked} of {len(own)}"] if own else []
    return ", ".join(parts)


def next_step(records: Sequence[Record]) -> str:
    """What the sweep tells to do: which defenses held in every run that was scored, or what would tell."""
    behind: dict[str, list[Record]] = {}
    for record in records:
        behind.setdefault(_fact(record, "defenses"), []).append(record)
    bare = behind.pop(UNDEFENDED, [])
    held = [name for name, own in behind.items() if any(r.metrics for r in own) and not any(map(has_leaked, own))]
    if not any(map(has_leaked, records)):
        return "Do not call the updates safe: nothing leaked to these methods at this budget, and others may show more."
    if held and any(map(has_leaked, bare)):
        behind_them = "it" if len(held) == 1 else "them"
        return f"Consider {enumeration(held)}: in these runs nothing leaked behind {behind_them}, which does not mean safe."
    if behind:
        return "Protect each update as you protect the samples: behind every defense of this sweep some run leaked, or none was scored."
    return f"Protect each update as you protect the samples, until a defense holds: {GRID} measures which does."


def has_leaked(record: Record) -> bool:
    return record.outcome != Outcome.CRASHED and verdict_of(record) in (Verdict.LEAKED, Verdict.PROVED)


def _title(key: tuple[str, str], groups: Mapping[tuple[str, str], Mapping[str, Record]]) -> str:
    """The method's name, with the options that tell it from others of its name."""
    parts = {one: _part(next(iter(found.values()))) for one, found in groups.items() if one[0] == key[0]}
    own = parts[key]
    namesakes = [part for part in parts.values() if part["name"] == own["name"]]
    return describe_part({name: value for name, value in own.items() if name == "name" or any(o.get(name) != value for o in namesakes)})


def _panel(surface: Surface[Any], method: str, found: Mapping[str, Record]) -> Panel:
    sizes = sorted({int(record.threat_model.get("batch_size") or 0) for record in found.values()})
    varying = _varying(list(found.values()))
    settings: dict[str, dict[int, dict[str, Record]]] = {}
    for place, record in found.items():
        name = "; ".join(filter(None, (_fact(record, key) for key in varying))) or "every run"
        settings.setdefault(name, {}).setdefault(int(record.threat_model.get("batch_size") or 0), {})[place] = record
    curves, ticks = _curves(surface, settings, sizes)
    return Panel(
        surface=surface.name,
        method=method,
        metric=metric_name(_headline(surface, found.values())),
        columns=[f"B = {size}" for size in sizes],
        rows=[
            (name, [_cell(surface, by_size[size]) if size in by_size else None for size in sizes])
            for name, by_size in sorted(settings.items(), key=_undefended_first)
        ],
        curves=curves,
        ticks=ticks,
        across=[(_across(size, sizes), str(size)) for size in sizes],
    )


def _headline(surface: Surface[Any], records: Iterable[Record]) -> str:
    return surface.headline_in({name: values for record in records for name, values in record.metrics.items()})


def _cell(surface: Surface[Any], runs: Mapping[str, Record]) -> HeatCell:
    metric = _headline(surface, runs.values())
    values = [value for record in runs.values() if (value := _value(record, metric)) is not None]
    leaked = sum(map(has_leaked, runs.values()))
    summary = summarize(values, higher_is_better(metric)) if values else None
    closed = [record for record in runs.values() if not has_leaked(record)]
    median = score(summary.median, metric) if summary else "–"
    ends = {score(end, metric) for end in (summary.low, summary.high)} if summary else set()
    reasons = dict.fromkeys(_why(record) for record in closed)
    return HeatCell(
        median=median,
        interval=score_range(summary.low, summary.high, metric) if summary and len(values) > 1 and ends != {median} else "",
        leaked=leaked,
        runs=len(runs),
        shade=leaked / len(runs),
        links=[(place, str(record.seed)) for place, record in sorted(runs.items(), key=lambda item: item[1].seed)],
        note=next(iter(reasons), ""),
    )


def _curves(
    surface: Surface[Any], settings: Mapping[str, Mapping[int, Mapping[str, Record]]], sizes: Sequence[int]
) -> tuple[list[Curve], list[tuple[float, str]]]:
    """The median over the seeds and its interval, at every batch size; and the ticks of the scale that all curves share."""
    every = [record for by_size in settings.values() for runs in by_size.values() for record in runs.values()]
    metric, logarithmic = _headline(surface, every), surface.plot == "errors"
    summaries: dict[str, dict[int, Any]] = {}
    for name, by_size in settings.items():
        for size, runs in by_size.items():
            values = [value for record in runs.values() if (value := _value(record, metric)) is not None]
            if values:
                summaries.setdefault(name, {})[size] = summarize(values, higher_is_better(metric))
    ends = [
        end
        for line in summaries.values()
        for s in line.values()
        for end in (s.low, s.high, s.median)
        if end is not None and math.isfinite(end)
    ]
    ends = [end for end in ends if end > 0] if logarithmic else ends
    if not ends or len(sizes) < 2:
        return [], []
    scale = math.log10 if logarithmic else float
    low, high = scale(min(ends)), scale(max(ends))
    low, high = (0.0, 1.0) if is_share(metric) else (low - 0.5, high + 0.5) if high - low < 1e-12 else (low, high)

    def down(value: float | None) -> float:
        if value is None or (logarithmic and value <= 0):
            return HEIGHT
        return round(min(HEIGHT, max(0.0, HEIGHT * (1 - (scale(value) - low) / (high - low)))), 1)

    curves = [
        Curve(
            number=number,
            name=name,
            points=[
                CurvePoint(
                    across=_across(size, sizes),
                    down=down(one.median),
                    top=min(down(one.low), down(one.high)),
                    bottom=max(down(one.low), down(one.high)),
                    title=f"{name}, batch size {size}: {score(one.median, metric)} ({score_range(one.low, one.high, metric)})",
                )
                for size, one in sorted(line.items())
                if one.median is not None
            ],
        )
        for number, (name, line) in enumerate(sorted(summaries.items(), key=_undefended_first))
    ]
    middle = (low + high) / 2
    ticks = [
        (down(10**at if logarithmic else at), power_of_ten(round(at)) if logarithmic else score(at, metric)) for at in (low, middle, high)
    ]
    return curves, ticks


def _across(size: int, sizes: Sequence[int]) -> float:
    return round(MARGIN + (100 - 2 * MARGIN) * (sizes.index(size) / max(1, len(sizes) - 1)), 2)


def _why(record: Record) -> str:
    """Why a run does not count as leaked, shortly: the end of its reason, which says what was lacking."""
    said = record.reason.rsplit("; ", 1)[-1]
    text = said if record.metrics else f"{record.outcome}: {said}"
    return text if len(text) <= LONGEST_NOTE else f"{text[: LONGEST_NOTE - 1]}…"


def _value(record: Record, metric: str) -> float | None:
    values = record.metrics.get(metric)
    return summarize(values, higher_is_better(metric)).median if values else None


def _undefended_first(item: tuple[str, Any]) -> str:
    return item[0].replace(UNDEFENDED, "")


def _method(record: Record) -> str:
    """The method with all its options."""
    return describe_part(_part(record))


def _part(record: Record) -> dict[str, Any]:
    """The method with the options that were set, as its configuration has them under the surface's key."""
    part = record.config.get(surface_named(record.surface).key)
    return {"name": record.method} | part if isinstance(part, dict) else {"name": record.method}


def _varying(records: Sequence[Record]) -> list[str]:
    keys = ("model", "data", "mode", "defenses", "labels")
    return [key for key in keys if len({json.dumps(record.threat_model.get(key), default=str) for record in records}) > 1]


def _fact(record: Record, key: str) -> str:
    value = record.threat_model.get(key)
    if value in (None, "", "given"):
        return ""
    if key == "defenses":
        return ", then ".join(describe_part(part) for part in value or []) or UNDEFENDED
    return str(value) if key != "labels" else f"labels {value}"
