"""Conditions under which an audit fails, for continuous integration: `leaked`, `labels.verdict == leaked`, `inputs.psnr.median > 20`.

A condition that nothing measured is neither met nor missed: `why_untested` says so, and the command ends with exit code 2. The same holds
where the truth refutes a certificate.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dosimeter.registry import BOUNDS, METRICS
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.judging import is_under_optimised, judge_surfaces
from dosimeter.surfaces.surface import surface_names, surfaces
from dosimeter.surfaces.verdicts import LEAKS, UTILITY, Verdict, verdict_of
from dosimeter.types import Record

GRAMMAR = (
    "leaked, surface.leaked, surface.verdict == VERDICT, surface.ceiling.metric OP number, "
    "or surface.metric.statistic OP number, such as 'inputs.psnr.median > 20'"
)
VERDICTS = {"leaked": Verdict.LEAKED, "not shown": Verdict.NOT_SHOWN, "not attempted": Verdict.NOT_ATTEMPTED}
VERDICTS |= {"impossible": Verdict.IMPOSSIBLE, "not measured": Verdict.NOT_MEASURED} | {verdict.value: verdict for verdict in Verdict}
COSTS = {"accuracy": True, "accuracy_kept": True, "update_bytes": False, "bytes_ratio": False, "update_seconds": False}
COSTS |= {"time_ratio": False, "epsilon": False}  # metrics of utility records, and whether more is better
OPERATORS: dict[str, Callable[[float, float], bool]] = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
CEILING = "ceiling"  # in place of a metric: what no attack can exceed, which a record holds by metric under details.ceiling
STATISTICS = ("median", "min", "max")

ANSWERS = (*LEAKS, Verdict.NOT_SHOWN, Verdict.IMPOSSIBLE)  # verdicts that rest on a method that ran, or on a theorem
REASONS_SHOWN = 3  # in the sentence on what nothing measured

_LEAKED = re.compile(r"\s*(?:(\w+)\.)?leaked\s*", re.ASCII)
_VERDICT = re.compile(r"\s*(\w+)\.verdict\s*(==|!=)\s*(['\"]?)([\w ]+?)\3\s*", re.ASCII)
_CONDITION = re.compile(r"\s*(\w+)\.(\w+)\.(\w+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", re.ASCII)


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
        if self.metric == CEILING:
            return _ceiling(record, self.statistic) if record.surface == self.surface else None
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

    def failure(self, records: Sequence[Record]) -> str | None:
        """A sentence on the record that crosses the bound furthest, or None."""
        trip = furthest_trip(self, records)
        return None if trip is None else str(trip)

    def why_untested(self, records: Sequence[Record]) -> str | None:
        """Why the condition is neither met nor missed: no record has the metric and none proves the surface closed, or a proof is false."""
        of_surface = [record for record in records if record.surface == self.surface]
        if refuted := _refuted(of_surface):
            return refuted
        if any(record.metrics.get(self.metric) or _is_closed(record) for record in of_surface if self.metric != CEILING):
            return None
        if self.metric == CEILING and any(self.value(record) is not None for record in of_surface):
            return None
        what = f"{self.surface}.{self.metric}" + (f".{self.statistic}" if self.metric == CEILING else "")
        why_absent = _why_no_ceiling if self.metric == CEILING else _why_absent
        of_surface.sort(key=lambda record: not record.metrics)  # a method that was scored knows best why this metric was not
        return _nothing_measures(what, [why_absent(record, self.metric) for record in of_surface])


@dataclass(frozen=True, kw_only=True)
class LeakCondition:
    """The verdict "leaked" on one surface, or on any."""

    surface: str | None

    def __str__(self) -> str:
        return "leaked" if self.surface is None else f"{self.surface}.leaked"

    def failure(self, records: Sequence[Record]) -> str | None:
        """A sentence on the surface that leaked, or None."""
        for verdict in judge_surfaces(records):
            if verdict.verdict in LEAKS and self.surface in (None, verdict.surface):
                return f"failed on {self}: {verdict.surface} {verdict.verdict} ({verdict.method}): {verdict.reason}"
        return None

    def why_untested(self, records: Sequence[Record]) -> str | None:
        """Why the verdict on a surface rests neither on a method that ran nor on a theorem; None where it does.

        Without a surface, every surface that the audit tried and that the gate waits for must have an answer.
        """
        if refuted := _refuted([record for record in records if self.surface in (None, record.surface)]):
            return refuted
        waits = {surface.name for surface in surfaces() if surface.gate_waits}
        tried = dict.fromkeys(record.surface for record in records if record.surface in waits)
        for surface in tried or ["anything"] if self.surface is None else [self.surface]:
            of_surface = [record for record in records if record.surface == surface]
            if not any(verdict_of(record) in ANSWERS for record in of_surface):
                return _nothing_measures(surface, [_why_absent(record, "") for record in of_surface])
        return None


@dataclass(frozen=True, kw_only=True)
class VerdictCondition:
    """The verdict on one surface: that it is this one, or that it is another."""

    surface: str
    verdict: Verdict
    equal: bool

    def __str__(self) -> str:
        return f"{self.surface}.verdict {'==' if self.equal else '!='} {self.verdict.value}"

    def failure(self, records: Sequence[Record]) -> str | None:
        """A sentence where the verdict meets the condition, or None."""
        found = self._found(records)
        if found is None or (found[0] in self._alike) is not self.equal:
            return None
        return f"failed on {self}: {self.surface} {found[0].value}: {found[1]}"

    def why_untested(self, records: Sequence[Record]) -> str | None:
        """Why there is no verdict, or one that rests on no method where a leak was asked for; else None."""
        if refuted := _refuted([record for record in records if record.surface == self.surface]):
            return refuted
        found = self._found(records)
        if found is None:
            return _nothing_measures(self.surface, [])
        if self.verdict in ANSWERS and self.equal and found[0] not in ANSWERS:
            return _nothing_measures(self.surface, [found[1]])
        return None

    @property
    def _alike(self) -> Sequence[Verdict]:
        """What counts as the verdict: what is proved without the private samples has leaked too."""
        return LEAKS if self.verdict is Verdict.LEAKED else (self.verdict,)

    def _found(self, records: Sequence[Record]) -> tuple[Verdict, str] | None:
        """The verdict and its reason; None where no record is of the surface."""
        judged = next((verdict for verdict in judge_surfaces(records) if verdict.surface == self.surface), None)
        if judged is not None:
            return judged.verdict, judged.reason
        crashed = next((record for record in records if record.surface == self.surface), None)
        return None if crashed is None else (Verdict.NOT_MEASURED, crashed.reason)


AnyCondition = Condition | LeakCondition | VerdictCondition


@dataclass(frozen=True, kw_only=True)
class Trip:
    """A record that meets the condition, and its value."""

    condition: Condition
    record: Record
    value: float

    def __str__(self) -> str:
        defenses = ", ".join(str(part.get("name")) for part in self.record.threat_model.get("defenses") or []) or "no defense"
        said = f"the ceiling is {self.value:.4g}" if self.condition.metric == CEILING else f"{self.record.method} gave {self.value:.4g}"
        return f"failed on {self.condition}: {said} (behind {defenses})"


def parse_condition(text: str) -> AnyCondition:
    """The condition that a text spells out, such as `leaked` or `inputs.psnr.median > 20`."""
    if leaked := _LEAKED.fullmatch(text):
        if leaked[1] is not None and leaked[1] not in surface_names():
            raise ValueError(f"--fail-on: expected a surface out of {', '.join(surface_names())}, got {leaked[1]!r}")
        return LeakCondition(surface=leaked[1])
    if judged := _VERDICT.fullmatch(text):
        surface, comparison, _, word = judged.groups()
        if surface not in surface_names():
            raise ValueError(f"--fail-on: expected a surface out of {', '.join(surface_names())}, got {surface!r}")
        if word not in VERDICTS:
            raise ValueError(f"--fail-on: expected a verdict out of {', '.join(VERDICTS)}, got {word!r}")
        return VerdictCondition(surface=surface, verdict=VERDICTS[word], equal=comparison == "==")
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"--fail-on: expected {GRAMMAR}, got {text!r}")
    surface, metric, statistic, comparison, bound = found.groups()
    gated = (*surface_names(), UTILITY)
    if surface not in gated:
        raise ValueError(f"--fail-on: expected a surface out of {', '.join(gated)}, got {surface!r}")
    if not math.isfinite(float(bound)):
        raise ValueError(f"--fail-on: expected a finite number, got {bound}")
    if metric == CEILING and surface != UTILITY:
        bounded = [BOUNDS.build(name) for name in BOUNDS]
        metrics = dict.fromkeys(name for name in METRICS if METRICS.build(name).surface == surface)
        metrics |= dict.fromkeys(bound.metric for bound in bounded if bound.surface == surface)
        if statistic not in metrics:
            raise ValueError(f"--fail-on: expected a metric of {surface} out of {', '.join(metrics)}, got {statistic!r}")
        return Condition(surface=surface, metric=metric, statistic=statistic, comparison=comparison, bound=float(bound))
    known = list(COSTS) if surface == UTILITY else [name for name in METRICS if METRICS.build(name).surface == surface]
    if metric not in known:
        raise ValueError(f"--fail-on: expected a metric of {surface} out of {', '.join(known)}, got {metric!r}")
    if statistic not in STATISTICS:
        raise ValueError(f"--fail-on: expected a statistic out of {', '.join(STATISTICS)}, got {statistic!r}")
    return Condition(surface=surface, metric=metric, statistic=statistic, comparison=comparison, bound=float(bound))


def furthest_trip(condition: Condition, records: Sequence[Record]) -> Trip | None:
    """The record of any method and setting that crosses the bound furthest, or None."""
    crossed = [
        Trip(condition=condition, record=record, value=value)
        for record in records
        if (value := condition.value(record)) is not None and OPERATORS[condition.comparison](value, condition.bound)
    ]
    return max(crossed, key=lambda trip: abs(trip.value - condition.bound), default=None)


def _ceiling(record: Record, metric: str) -> float | None:
    """The ceiling that a record holds for a metric: of several samples, the one that allows the attacker most.

    None where one sample has no ceiling, since nothing limits an attacker on that sample.
    """
    held = record.details.get(CEILING)
    value = held.get(metric) if isinstance(held, dict) else None
    listed = value if isinstance(value, list) else [value]
    values = [float(one) for one in listed if isinstance(one, (int, float)) and math.isfinite(one)]
    if not values or len(values) < len(listed):
        return None
    larger_is_worse = metric not in METRICS or METRICS.build(metric).higher_is_better
    return (max if larger_is_worse else min)(values)


def _is_closed(record: Record) -> bool:
    return record.surface != UTILITY and verdict_of(record) is Verdict.IMPOSSIBLE


def _refuted(records: Sequence[Record]) -> str:
    """A sentence on proofs that the truth refutes, which make a pass worthless; "" where there are none."""
    false = dict.fromkeys(f"{record.method} ({record.surface})" for record in records if record.details.get("false_certificates"))
    return f"the truth refutes what {', '.join(false)} claims to have proved: do not trust this run, and report it" if false else ""


def _nothing_measures(what: str, reasons: Sequence[str]) -> str:
    shown = list(dict.fromkeys(reasons))[:REASONS_SHOWN]
    return f"nothing that ran measures {what}" + (f" ({'; '.join(shown)})" if shown else "")


def _why_absent(record: Record, metric: str) -> str:
    unavailable = record.details.get("unavailable")
    reason = unavailable.get(metric) if isinstance(unavailable, dict) else None
    return f"{record.method}: {reason or record.reason}"


def _why_no_ceiling(record: Record, _: str) -> str:
    held = record.details.get(CEILING)
    refused = held.get("refused") if isinstance(held, dict) else None
    return (
        "; ".join(f"{name}: {why}" for name, why in refused.items()) if isinstance(refused, dict) and refused else "no bound was computed"
    )


def caveat(condition: AnyCondition, records: Sequence[Record]) -> str:
    """A sentence where a tested condition is not met, but ceilings are estimates or attacks were under-optimised; else an empty text."""
    if condition.failure(records) or condition.why_untested(records):
        return ""
    if isinstance(condition, Condition) and condition.metric == CEILING:
        return _estimates(condition, records)
    surfaces = surface_names() if condition.surface is None else [condition.surface]
    short = dict.fromkeys(
        record.method for record in records if record.surface in surfaces and record.surface != UTILITY and is_under_optimised(record)
    )
    return f"not failed on {condition}, but {', '.join(short)} under-optimised: more steps may show more" if short else ""


def _estimates(condition: Condition, records: Sequence[Record]) -> str:
    """A sentence on the bounds whose ceilings are no theorems; "" where all are."""
    held = [record.details[CEILING].get("bounds") for record in records if condition.value(record) is not None]
    facts = [facts for bounds in held if isinstance(bounds, dict) and isinstance(facts := bounds.get(condition.statistic), dict)]
    guessed = dict.fromkeys(str(fact.get("bound")) for fact in facts if fact.get("proved") is not True)
    return (
        f"not failed on {condition}, but the ceiling of {', '.join(guessed)} is an estimate: an attacker may exceed it" if guessed else ""
    )
