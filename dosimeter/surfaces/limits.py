"""Three numbers for each sample on one scale: what is proved, what the best method showed, and what no attacker can exceed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dosimeter.registry import BOUNDS, METRICS
from dosimeter.surfaces.judging import gravity
from dosimeter.surfaces.surface import Surface, surface_named
from dosimeter.types import Record

CEILING = "ceiling"  # what a record holds by metric under this name of its details
PROVED = "proved_samples"  # which of its scores are proved from the update alone
CLOSED_DB = 1.0  # between a PSNR and its ceiling: the question counts as closed
CLOSED_SHARE = 0.005  # between a share and its ceiling: both are printed alike


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is proved ≤ what was shown ≤ what no attacker can exceed, sample by sample, in the surface's headline."""

    surface: str
    metric: str
    proved: list[float | None]  # None: nothing is proved of the sample
    shown: list[float | None]  # None: no method gave it back
    ceiling: list[float | None]  # None: no ceiling is known
    method: str  # that showed most
    bound: str  # that gave the ceiling; "": the metric itself ends there
    theorem: bool  # False: the ceiling is an estimate
    assumptions: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()  # why no ceiling is known
    identification: Mapping[str, Any] = field(default_factory=dict)  # of one sample among candidates: attack, bound, rounds and ε
    bits: tuple[float, ...] = ()  # that the update tells of each sample, as if it were linear

    @property
    def gap(self) -> float | None:
        """Between the ceiling and what was shown, each averaged over the samples that have both; None without such a sample.

        A ceiling on a PSNR limits a mean squared error, so that squared errors are averaged.
        """
        pairs = [(top, value) for top, value in zip(self.ceiling, self.shown) if top is not None and value is not None]
        if not pairs or not METRICS.build(self.metric).higher_is_better:
            return None
        top, value = (self._mean([pair[side] for pair in pairs]) for side in (0, 1))
        return top - value

    @property
    def closed(self) -> bool:
        """Whether nothing is left to find: every sample is proved, or the best method reaches the ceiling."""
        if self.proved and all(value is not None for value in self.proved):
            return True
        if self.gap is None or any(value is None for value in self.shown):
            return False
        return abs(self.gap) <= (CLOSED_DB if self._in_decibels else CLOSED_SHARE if self.bound else 1e-9)

    @property
    def tells(self) -> bool:
        """Whether the limits say more than the scores alone: the question is closed, or a bound is known or was refused."""
        return self.closed or bool(self.bound) or any(why != surface_named(self.surface).without_ceiling for why in self.refusals)

    @property
    def mean_shown(self) -> float | None:
        return self._mean([value for value in self.shown if value is not None])

    @property
    def mean_ceiling(self) -> float | None:
        return self._mean([value for value in self.ceiling if value is not None])

    @property
    def _in_decibels(self) -> bool:
        return METRICS.build(self.metric).unit == "dB"

    def _mean(self, values: Sequence[float]) -> Any:
        if not values:
            return None
        if not self._in_decibels:
            return sum(values) / len(values)
        squared = sum(10 ** (-value / 10) for value in values) / len(values)
        return -10 * math.log10(squared) if squared > 0 else math.inf


def limits_of(surface: Surface[Any], records: Sequence[Record]) -> Limits | None:
    """The limits of a surface in one setting, its batches one after another; None without a score and without a ceiling."""
    metric = _headline(surface, records)
    telling = [r for r in records if r.surface == surface.name and (r.metrics.get(metric) or _held(r, metric))]
    batches: dict[str, list[Record]] = {}
    for record in telling:
        batches.setdefault(f"{record.config.get('subject', {}).get('batch_hash')} {record.seed}", []).append(record)
    columns = [_columns(surface, batch) for batch in batches.values()]
    if not columns:
        return None
    proved, shown, tops = ([value for column in columns for value in column[side]] for side in range(3))
    known = any(top is not None for top in tops)
    facts = next((facts for record in telling if (facts := _bound_facts(record, metric))), {})
    best = max(telling, key=lambda record: (bool(record.metrics.get(metric)), gravity(record)))
    return Limits(
        surface=surface.name,
        metric=metric,
        proved=proved,
        shown=shown,
        ceiling=tops if known else [best_possible(metric)] * len(shown),
        method=best.method,
        bound=str(facts.get("bound", "")) if known else "",
        theorem=bool(facts.get("proved")),
        assumptions=tuple(map(str, facts.get("assumptions") or [])) if known else (),
        refusals=() if known else _refusals(telling, metric) or tuple(filter(None, [surface.without_ceiling])),
        bits=_bits(facts, len(shown)),
        identification=next((facts for record in telling if (facts := _bound_facts(record, "identified"))), {}),
    )


def _columns(surface: Surface[Any], batch: Sequence[Record]) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """What is proved, what the method that showed most reached, and the ceiling, for the samples of one batch."""
    metric = _headline(surface, batch)
    scored = [record for record in batch if record.metrics.get(metric)]
    top = next((held for record in batch if (held := _held(record, metric))), [])
    if not scored:
        return [None] * len(top), [None] * len(top), top
    shown = [_finite(value) for value in max(scored, key=gravity).metrics[metric]]
    proved = _proved(surface, scored, len(shown))
    shown = [_better(metric, *pair) for pair in zip(shown, proved)]  # what another method proves of a sample is shown too
    return proved, shown, top if len(top) == len(shown) else [None] * len(shown)


def _headline(surface: Surface[Any], records: Sequence[Record]) -> str:
    return surface.headline_in(
        {name: values for record in records if record.surface == surface.name for name, values in record.metrics.items()}
    )


def best_possible(metric: str) -> float | None:
    """Where a metric itself ends: all of it for a share, nothing for an error. A PSNR has no end."""
    measure = METRICS.build(metric)
    if measure.is_share:
        return 1.0
    return None if measure.higher_is_better else 0.0


def _proved(surface: Surface[Any], batch: Sequence[Record], count: int) -> list[float | None]:
    """The best proved score of each sample. A record whose proofs the truth refutes proves nothing."""
    best: list[float | None] = [None] * count
    metric = _headline(surface, batch)
    for record in batch:
        sure, values = record.details.get(PROVED), record.metrics[metric]
        if record.details.get("false_certificates") or not isinstance(sure, list) or not len(sure) == len(values) == count:
            continue
        for place, (is_sure, value) in enumerate(zip(sure, values)):
            if is_sure is True:
                best[place] = _better(metric, _finite(value), best[place])
    return best


def _better(metric: str, one: float | None, other: float | None) -> float | None:
    """Of two scores of a sample the one that leaks more; a score goes before none."""
    if one is None or other is None:
        return other if one is None else one
    return (max if METRICS.build(metric).higher_is_better else min)(one, other)


def _held(record: Record, metric: str) -> list[float | None]:
    """The ceiling that a record holds, one number a sample."""
    held = record.details.get(CEILING)
    values = held.get(metric) if isinstance(held, dict) else None
    return [_finite(value) for value in values] if isinstance(values, list) else []


def _bound_facts(record: Record, metric: str) -> dict[str, Any]:
    held = record.details.get(CEILING)
    bounds = held.get("bounds") if isinstance(held, dict) else None
    facts = bounds.get(metric) if isinstance(bounds, dict) else None
    return facts if isinstance(facts, dict) else {}


def _bits(facts: dict[str, Any], count: int) -> tuple[float, ...]:
    bits = [_finite(value) for value in facts.get("bits") or []] if isinstance(facts.get("bits"), list) else []
    return tuple(value for value in bits if value is not None) if len(bits) == count and None not in bits else ()


def _refusals(records: Sequence[Record], metric: str) -> tuple[str, ...]:
    """Why each bound on the metric does not fit, once a reason."""
    said: dict[str, None] = {}
    for record in records:
        held = record.details.get(CEILING)
        refused = held.get("refused") if isinstance(held, dict) else None
        for name, why in refused.items() if isinstance(refused, dict) else ():
            if name in BOUNDS and BOUNDS.build(name).metric == metric:
                said[str(why)] = None
    return tuple(said)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None
