"""Conditions under which an audit fails, for continuous integration: `inputs.psnr.median > 20`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dosimeter.registry import METRICS
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.surface import surface_names
from dosimeter.surfaces.verdicts import UTILITY, Verdict, verdict_of
from dosimeter.types import Record

GRAMMAR = "surface.metric.statistic OP number, such as 'inputs.psnr.median > 20'"
COSTS = {"accuracy": True, "accuracy_kept": True, "update_bytes": False, "bytes_ratio": False, "update_seconds": False}
COSTS |= {"time_ratio": False, "epsilon": False}  # metrics of utility records, and whether more is better
OPERATORS: dict[str, Callable[[float, float], bool]] = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
STATISTICS = ("median", "min", "max")

_CONDITION = re.compile(r"\s*(\w+)\.(\w+)\.(\w+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A statistic of one metric over the samples of a record, and the bound that it must not cross."""

    surface: str
    metric: str
    statistic: str
    comparison: str
    bound: float

    def __str__(self) -> str:
        return f"{self.surface}.{self.metric}.{self.statistic} {self.comparison} {self.bound:g}"

    def value(self, record: Record) -> float | None:
        """The statistic of a record, or None where the record lacks the metric or the statistic is a miss."""
        values = record.metrics.get(self.metric)
        if record.surface != self.surface or not values:
            return None
        if self.metric == "epsilon" and record.threat_model.get("defenses"):
            values = [math.inf if value is None else value for value in values]  # a defense that promises nothing
        best = COSTS[self.metric] if self.surface == UTILITY else METRICS.build(self.metric).higher_is_better
        if self.statistic == "median":
            return summarize(values, best).median
        known = [value for value in values if value is not None and not math.isnan(value)]
        missed_end = "min" if best else "max"  # a miss is the worst score
        if not known or (self.statistic == missed_end and len(known) < len(values)):
            return None
        return (min if self.statistic == "min" else max)(known)


@dataclass(frozen=True, kw_only=True)
class Trip:
    """A record that meets the condition, and its value."""

    condition: Condition
    record: Record
    value: float

    def __str__(self) -> str:
        defenses = ", ".join(str(part.get("name")) for part in self.record.threat_model.get("defenses") or []) or "no defense"
        return f"failed on {self.condition}: {self.record.method} gave {self.value:.4g} (behind {defenses})"


def parse_condition(text: str) -> Condition:
    """The condition that a text spells out, such as `inputs.psnr.median > 20`."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"--fail-on: expected {GRAMMAR}, got {text!r}")
    surface, metric, statistic, comparison, bound = found.groups()
    surfaces = (*surface_names(), UTILITY)
    if surface not in surfaces:
        raise ValueError(f"--fail-on: expected a surface out of {', '.join(surfaces)}, got {surface!r}")
    known = list(COSTS) if surface == UTILITY else [name for name in METRICS if METRICS.build(name).surface == surface]
    if metric not in known:
        raise ValueError(f"--fail-on: expected a metric of {surface} out of {', '.join(known)}, got {metric!r}")
    if statistic not in STATISTICS:
        raise ValueError(f"--fail-on: expected a statistic out of {', '.join(STATISTICS)}, got {statistic!r}")
    return Condition(surface=surface, metric=metric, statistic=statistic, comparison=comparison, bound=float(bound))


def is_untested(condition: Condition, records: Sequence[Record]) -> bool:
    """Whether no record has the condition's metric and none proves its surface closed, so that the condition is neither met nor missed."""
    of_surface = [record for record in records if record.surface == condition.surface]
    return not any(condition.metric in record.metrics or _is_closed(record) for record in of_surface)


def _is_closed(record: Record) -> bool:
    return record.surface != UTILITY and verdict_of(record) is Verdict.IMPOSSIBLE


def furthest_trip(condition: Condition, records: Sequence[Record]) -> Trip | None:
    """The record of any method and setting that crosses the bound furthest, or None."""
    crossed = [
        Trip(condition=condition, record=record, value=value)
        for record in records
        if (value := condition.value(record)) is not None and OPERATORS[condition.comparison](value, condition.bound)
    ]
    return max(crossed, key=lambda trip: abs(trip.value - condition.bound), default=None)
