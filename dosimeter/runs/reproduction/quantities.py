"""From the records of a row's trials to the numbers that papers print.

A quantity is a metric's name, `count_<class>`, a side measure (side_measures.py), or what a study gives (studies). A metric's name may
be followed by `_of_targets`, for the target samples alone, and then by one of `_below_<bound>`, `_where_below_<bound>`, `_above_<bound>`,
`_best_<number>`, `_margin`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dosimeter.registry import METRICS
from dosimeter.runs.reproduction.side_measures import SIDE_MEASURES
from dosimeter.runs.reproduction.studies.study import studied_quantities
from dosimeter.types import Record

Findings = Mapping[str, float | None]  # of a study: a number for each of its quantities
Trial = Record | Findings  # what one batch gave

BELOW = re.compile(r"(\w+?)_below_([\d.e-]+)")  # the share of samples whose error is below a bound
WHERE_BELOW = re.compile(r"(\w+?)_where_below_([\d.e-]+)")  # the mean error of those samples
ABOVE = re.compile(r"(\w+?)_above_([\d.e-]+)")  # the share of samples whose score reaches a bound
BEST = re.compile(r"(\w+?)_best_(\d+)")  # the mean over the best samples of a batch
MARGIN = re.compile(r"(\w+?)_margin")  # how far the mean lies above the best null's mean
DERIVED = (WHERE_BELOW, BELOW, ABOVE, BEST, MARGIN)
OF_TARGETS = "_of_targets"
OF_DETAILS = {"scalar_error": True, "probability_cosine": False}  # one number that a record holds among its details; whether it is an error
COUNT = re.compile(r"count_(\d+)")  # how many samples of a class were recovered


@dataclass(frozen=True)
class Figure:
    """The mean over trials, as papers print it, and its standard error."""

    mean: float
    standard_error: float | None  # None for a single trial
    trials: int


def figure_of(quantity: str, records: Sequence[Trial]) -> Figure | None:
    """A quantity's mean over the trials; a metric is first averaged over a trial's samples. None where no trial has the quantity."""
    values = [value for record in records if (value := _value_of(quantity, record)) is not None]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Figure(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Figure(mean, math.sqrt(variance / len(values)), len(values))


def is_error(quantity: str) -> bool:
    """Whether a quantity is an error of no fixed scale, which is compared by its ratio."""
    if quantity in OF_DETAILS:
        return OF_DETAILS[quantity]
    if quantity in SIDE_MEASURES:
        return SIDE_MEASURES[quantity].is_error
    if quantity in studied_quantities():
        return studied_quantities()[quantity]
    where = WHERE_BELOW.fullmatch(quantity)
    name = where[1] if where else quantity
    return name in METRICS and not METRICS.build(name).higher_is_better


def check_quantity(quantity: str, path: str) -> None:
    """Refuse a quantity that no record can give."""
    if (
        quantity not in {**SIDE_MEASURES, **studied_quantities()}
        and _metric_of(quantity) not in OF_DETAILS
        and not COUNT.fullmatch(quantity)
    ):
        METRICS.entry(_metric_of(quantity), path)


def _metric_of(quantity: str) -> str:
    derived = next((match for pattern in DERIVED if (match := pattern.fullmatch(quantity))), None)
    return (derived[1] if derived else quantity).removesuffix(OF_TARGETS)


def _value_of(quantity: str, trial: Trial) -> float | None:
    if isinstance(trial, Record):
        return _value(quantity, trial) if trial.metrics else None
    value = trial.get(quantity)
    return value if value is not None and math.isfinite(value) else None


def _value(quantity: str, record: Record) -> float | None:
    if quantity in SIDE_MEASURES:
        return record.details.get(quantity)
    if match := COUNT.fullmatch(quantity):
        counts = record.details.get("counts", [])
        return float(counts[int(match[1])]) if int(match[1]) < len(counts) else 0.0
    if match := MARGIN.fullmatch(quantity):
        return _margin(match[1], record)
    derived = next((match for pattern in (WHERE_BELOW, BELOW, ABOVE, BEST) if (match := pattern.fullmatch(quantity))), None)
    name = derived[1] if derived else quantity
    values = _samples(name, record.metrics, record)
    if derived is None:
        return _mean(values)
    if not values:
        return None
    bound = float(derived[2])
    if derived.re is WHERE_BELOW:
        return _mean([error for error in values if error is not None and error < bound])
    if derived.re is BELOW:
        return sum(error is not None and error < bound for error in values) / len(values)
    if derived.re is ABOVE:
        return sum(score is not None and score >= bound for score in values) / len(values)
    return _mean(sorted((score for score in values if score is not None), reverse=True)[: int(bound)])


def _samples(name: str, metrics: Mapping[str, Sequence[float | None]], record: Record) -> Sequence[float | None]:
    """A metric's values, one a sample. With `_of_targets`, those of the target samples, where a miss counts as 0."""
    if name in OF_DETAILS:
        return [record.details.get(name)]
    values = [value if value is not None and math.isfinite(value) else None for value in metrics.get(name.removesuffix(OF_TARGETS), ())]
    if not name.endswith(OF_TARGETS) or not values:
        return values
    return [values[position] or 0.0 for position in record.config["subject"]["targets"]]


def _margin(name: str, record: Record) -> float | None:
    own = _mean(_samples(name, record.metrics, record))
    nulls = [_mean(_samples(name, columns, record)) for columns in record.nulls.values()]
    known = [null for null in nulls if null is not None]
    return None if own is None or not known else own - max(known)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values, or None where one is missing: a miss cannot be averaged."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None
