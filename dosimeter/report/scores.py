"""Scores as the report writes them: with the metric's digits and unit. A missing score is `miss`."""

from __future__ import annotations

import math

from dosimeter.numbers import THIN, plain, significant
from dosimeter.report.words import is_share, unit


def score(value: float | None, metric: str, with_unit: bool = True) -> str:
    """A score of a metric: `24.1 dB`, `94 %`, `3.2×10⁻⁵`; None is a miss."""
    if value is None or math.isnan(value):
        return "miss"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if is_share(metric):
        return plain(100 * value, 0 if abs(100 * value - round(100 * value)) < 0.05 else 1) + (f"{THIN}%" if with_unit else "")
    symbol = unit(metric)
    text = plain(value, 1) if symbol == "dB" else significant(value)
    return f"{text}{THIN}{symbol}" if symbol and with_unit else text


def score_range(low: float | None, high: float | None, metric: str) -> str:
    """Two scores joined by a dash, the unit written once."""
    bare = [score(value, metric, with_unit=False) for value in (low, high)]
    return score(low, metric) if bare[0] == bare[1] else f"{bare[0]} – {score(high, metric)}"
