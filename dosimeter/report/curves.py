"""Curves of a method on the page: what it finds at each share of false alarms, beside what guessing finds and what noise allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dosimeter.numbers import THIN
from dosimeter.report.plots import HEIGHT, Scale, Tick

ACROSS = Scale(low=1e-3, high=1.0, logarithmic=True)
STYLES = {"found": "shown", "guessing": "null", "at most": "top"}  # a curve of another name is drawn like the first
NAMES = {"found": "this method", "guessing": "guessing", "at most": "the most that differential privacy allows any test"}
MOST_POINTS = 200  # of a curve in a record that may come from anywhere


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    style: str
    segments: list[tuple[float, float, float, float]]  # per cent across and pixels from the top, of both ends


@dataclass(frozen=True, kw_only=True)
class CurvePlot:
    curves: list[Curve]
    across_ticks: list[Tick]  # per cent
    down_ticks: list[Tick]  # pixels from the top
    height: float
    summary: str  # for screen readers


def curve_plot(method: str, curves: Mapping[str, Any]) -> CurvePlot | None:
    """The plot of a method's curves, each a list of points (x, y) in [0, 1]; None without one."""
    drawn = [
        Curve(name=NAMES.get(name, name), style=STYLES.get(name, "shown"), segments=_segments(places))
        for name, points in curves.items()
        if len(places := _places(points)) > 1
    ]
    if not drawn:
        return None
    return CurvePlot(
        curves=drawn,
        across_ticks=[Tick(100 * ACROSS.at(rate), f"{100 * rate:g}{THIN}%") for rate in (0.001, 0.01, 0.1, 1.0)],
        down_ticks=[Tick(round(HEIGHT * (1 - share), 1), f"{100 * share:g}{THIN}%") for share in (0.0, 0.25, 0.5, 0.75, 1.0)],
        height=HEIGHT,
        summary=f"Members found by {method} at each share of false alarms, beside {', '.join(curve.name for curve in drawn[1:])}",
    )


def _places(points: Any) -> list[tuple[float, float]]:
    """The points that are pairs of finite numbers, from left to right: per cent across, pixels from the top."""
    pairs = [pair for pair in points[:MOST_POINTS] if isinstance(pair, list) and len(pair) == 2] if isinstance(points, list) else []
    known = [(float(x), float(y)) for x, y in pairs if all(isinstance(v, (int, float)) and math.isfinite(v) for v in (x, y))]
    return sorted((round(100 * ACROSS.at(x), 2), round(HEIGHT * (1 - min(max(y, 0.0), 1.0)), 1)) for x, y in known)


def _segments(places: list[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    return [(*start, *end) for start, end in pairwise(places)]
