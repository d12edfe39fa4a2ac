"""From the records of a row's trials to the numbers that papers print."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dosimeter.registry import METRICS
from dosimeter.types import Record

BELOW = re.compile(r"(\w+?)_below_([\d.e-]+)")  # the share of samples whose error is below a bound
WHERE_BELOW = re.compile(r"(\w+?)_where_below_([\d.e-]+)")  # the mean error of those samples
COUNT = re.compile(r"count_(\d+)")  # how many samples of a class were recovered


@dataclass(frozen=True)
class Figure:
    """The mean over trials, as papers print it, with how sure it is."""

    mean: float
    standard_error: float | None  # None for a single trial
    trials: int


def figure_of(quantity: str, records: Sequence[Record]) -> Figure | None:
    """A metric's mean over the trials (each trial's mean over its samples), or one of the quantities above; None where no trial has it."""
    values = [value for record in records if record.metrics and (value := _value(quantity, record)) is not None]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Figure(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Figure(mean, math.sqrt(variance / len(values)), len(values))


def is_error(quantity: str) -> bool:
    """An error of no fixed scale, which is compared by its ratio."""
    where = WHERE_BELOW.fullmatch(quantity)
    name = where[1] if where else quantity
    return name in METRICS and not METRICS.build(name).higher_is_better


def check_quantity(quantity: str, path: str) -> None:
    """Refuse what no record can give."""
    pattern = WHERE_BELOW.fullmatch(quantity) or BELOW.fullmatch(quantity)
    name = pattern[1] if pattern else quantity
    if not COUNT.fullmatch(quantity):
        METRICS.entry(name, path)


def _value(quantity: str, record: Record) -> float | None:
    if match := COUNT.fullmatch(quantity):
        counts = record.details.get("counts", [])
        return float(counts[int(match[1])]) if int(match[1]) < len(counts) else 0.0
    if match := WHERE_BELOW.fullmatch(quantity):
        small = [error for error in record.metrics[match[1]] if error is not None and error < float(match[2])]
        return math.fsum(small) / len(small) if small else None
    if match := BELOW.fullmatch(quantity):
        errors = record.metrics[match[1]]
        return sum(error is not None and error < float(match[2]) for error in errors) / len(errors)
    values = record.metrics.get(quantity)
    if not values or any(value is None for value in values):  # a miss has no value that could be averaged
        return None
    return math.fsum(value for value in values if value is not None) / len(values)
