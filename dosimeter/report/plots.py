"""The positions of all marks of a plot. Horizontal positions are per cent, so that a plot fits any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dosimeter.numbers import THIN, plain, power_of_ten, significant
from dosimeter.report.scores import score
from dosimeter.report.words import higher_is_better, metric_name, null_name, unit
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.scores import Nulls, Values

HEIGHT = 180.0  # of the per-sample plot, in CSS pixels
SYMBOLS = ("dash", "ring", "triangle", "cross")  # of the nulls, in this order


@dataclass(frozen=True)
class Tick:
    position: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A linear or logarithmic axis. `at` gives a value's position as a share of the length, clamped to [0, 1]."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True)
class Mark:
    """One null: its symbol, and where it stands."""

    symbol: str
    position: float


@dataclass(frozen=True, kw_only=True)
class Band:
    """The middle nine tenths of a null, and its median."""

    symbol: str
    start: float  # per cent
    width: float
    median: float


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One row of a strip plot: the scores as dots on a track, over the bands of the nulls."""

    name: str
    text: str  # the median in words
    dots: list[float]  # per cent
    misses: int
    bands: list[Band]
    summary: str  # for screen readers


@dataclass(frozen=True, kw_only=True)
class StripPlot:
    title: str
    strips: list[Strip]
    ticks: list[Tick]
    legend: list[tuple[str, str]]  # symbol, name
    axis: str
    shaded: bool


@dataclass(frozen=True, kw_only=True)
class Column:
    """One sample of the per-sample plot: its score and its nulls on one vertical line."""

    number: int
    across: float  # per cent
    score: float | None  # pixels from the top
    rival: float | None  # the best null, from which the score's stem rises
    nulls: list[Mark]
    beats: bool


@dataclass(frozen=True, kw_only=True)
class SamplePlot:
    columns: list[Column]
    ticks: list[Tick]  # pixels from the top
    legend: list[tuple[str, str]]
    axis: str
    height: float
    summary: str


def share_plot(rows: Sequence[tuple[str, Mapping[str, Values], Nulls]], metric: str) -> StripPlot | None:
    """A share recovered by each method on a track from 0 to 100 %, over what the nulls get."""
    strips = [(name, metric, found[metric], nulls) for name, found, nulls in rows if metric in found]
    ticks = [Tick(100 * share, f"{100 * share:.0f}\u202f%") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _strip_plot(strips, Scale(low=0, high=1), ticks, "share recovered; further right means more leaked")


def error_plot(rows: Sequence[tuple[str, Mapping[str, Values], Nulls]], metric: str) -> StripPlot | None:
    """Errors of each method on a logarithmic track, one dot a sample."""
    strips = [(name, metric, found[metric], nulls) for name, found, nulls in rows if metric in found]
    values = _finite(value for _, _, found, nulls in strips for column in (found, *_columns(nulls, metric).values()) for value in column)
    scale = _logarithmic(values)
    powers = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
    step = math.ceil(len(powers) / 6)
    ticks = [Tick(100 * scale.at(10.0**power), power_of_ten(power)) for power in powers if power % step == 0]
    return _strip_plot(strips, scale, ticks, "one dot a sample; further left means more leaked")


def sample_scale(rows: Sequence[tuple[Values, Nulls]], metric: str) -> Scale:
    """One axis for the per-sample plots of several methods, so that they can be compared."""
    values = _finite(value for found, nulls in rows for column in (found, *_columns(nulls, metric).values()) for value in column)
    step = round_step((max(values) - min(values)) if values else 1.0)
    low, high = (step * math.floor(min(values) / step), step * math.ceil(max(values) / step)) if values else (0.0, 1.0)
    return Scale(low=low, high=high if high > low else low + step)


def sample_plot(
    method: str, found: Values, nulls: Nulls, metric: str, scale: Scale, beats_nulls: Callable[[float | None, Values], bool]
) -> SamplePlot:
    """Every sample's score beside its own nulls, joined to the best null by a stem. `beats_nulls` decides which scores are marked."""
    columns_of = _columns(nulls, metric)
    best = max if higher_is_better(metric) else min
    columns = []
    for i, value in enumerate(found):
        rivals = {name: column[i] for name, column in columns_of.items() if i < len(column)}
        finite = _finite(rivals.values())
        rival = best(finite) if finite else None
        columns.append(
            Column(
                number=i + 1,
                across=100 * (i + 0.5) / len(found),
                score=_down(scale, value),
                rival=_down(scale, rival),
                nulls=[Mark(_symbol(columns_of, name), _down(scale, null) or 0.0) for name, null in rivals.items() if null is not None],
                beats=beats_nulls(value, list(rivals.values())),
            )
        )
    step = round_step(scale.high - scale.low)
    levels = [scale.low + step * i for i in range(round((scale.high - scale.low) / step) + 1)]
    return SamplePlot(
        columns=columns,
        ticks=[Tick(_down(scale, level) or 0.0, level_text(level, metric, level == levels[-1])) for level in levels],
        legend=[(_symbol(columns_of, name), null_name(name)) for name in columns_of],
        axis=metric_name(metric),
        height=HEIGHT,
        summary=_summary(method, metric, found, columns_of),
    )


def _strip_plot(strips: Sequence[tuple[str, str, Values, Nulls]], scale: Scale, ticks: list[Tick], axis: str) -> StripPlot | None:
    if not strips:
        return None
    names = dict.fromkeys(name for _, metric, _, nulls in strips for name in _columns(nulls, metric))
    drawn = []
    for name, metric, found, nulls in strips:
        columns = _columns(nulls, metric)
        finite = _finite(found)
        drawn.append(
            Strip(
                name=name,
                text=score(summarize(found, higher_is_better(metric)).median, metric),
                dots=[100 * scale.at(value) for value in finite],
                misses=len(found) - len(finite),
                bands=[_band(_symbol(names, null), _finite(column), scale) for null, column in columns.items() if _finite(column)],
                summary=_summary(name, metric, found, columns),
            )
        )
    return StripPlot(
        title=metric_name(strips[0][1]),
        strips=drawn,
        ticks=ticks,
        legend=[(_symbol(names, name), null_name(name)) for name in names],
        axis=axis,
        shaded=any(band.width > 0 for strip in drawn for band in strip.bands),
    )


def _band(symbol: str, values: list[float], scale: Scale) -> Band:
    ordered = sorted(values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.05, 0.5, 0.95))
    return Band(symbol=symbol, start=100 * scale.at(low), width=100 * (scale.at(high) - scale.at(low)), median=100 * scale.at(middle))


def _summary(method: str, metric: str, found: Values, columns: Mapping[str, Values]) -> str:
    best = higher_is_better(metric)
    nulls = [f"{null_name(name)} {score(summarize(column, best).median, metric)}" for name, column in columns.items()]
    text = f"{metric_name(metric)} of {method}: median {score(summarize(found, best).median, metric)} of {len(found)}"
    return f"{text}; nulls: {', '.join(nulls)}" if nulls else text


def _columns(nulls: Nulls, metric: str) -> dict[str, Values]:
    return {name: columns[metric] for name, columns in nulls.items() if columns.get(metric)}


def _finite(values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _symbol(names: Mapping[str, object], name: str) -> str:
    return SYMBOLS[list(names).index(name) % len(SYMBOLS)]


def _down(scale: Scale, value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    return round(HEIGHT * (1 - scale.at(value)), 1)


def _logarithmic(values: Sequence[float]) -> Scale:
    positive = [value for value in values if value > 0] or [1.0]
    low = 10.0 ** max(math.floor(math.log10(min(positive))), -10)
    return Scale(low=low, high=max(10.0 ** math.ceil(math.log10(max(positive))), 10 * low), logarithmic=True)


def round_step(extent: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, such that `extent` has about four."""
    raw = max(extent, 1e-9) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)


def level_text(value: float, metric: str, last: bool) -> str:
    """A tick's number, with the unit on the last tick alone."""
    text = plain(value, 0) if value == round(value) else significant(value)
    return f"{text}{THIN}{unit(metric)}" if last and unit(metric) else text
