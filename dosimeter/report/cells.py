"""The cells of a grid of defenses, read from the records: what leaks behind each list of defenses, and its cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dosimeter.numbers import significant
from dosimeter.report.settings import describe_part, group_by_setting
from dosimeter.surfaces.limits import Limits, limits_of
from dosimeter.surfaces.surface import Surface, surfaces
from dosimeter.surfaces.verdicts import UTILITY, Verdict, verdict_of
from dosimeter.types import Outcome, Record

LARGEST_PROTECTING_EPSILON = 10.0  # beyond it one sample may change the odds of an outcome by e^10, some 22,000 times


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One list of defenses: what leaks behind it, surface by surface, and what it costs."""

    number: int
    name: str
    defended: bool
    leaks: dict[str, float]  # surface -> the share that leaks, for the surfaces that were measured
    ceilings: dict[str, Limits]  # surface -> what no attacker can exceed, for the surfaces with a known bound
    accuracy: float | None  # None where the training could not be run
    kept: float | None  # share of the undefended accuracy
    guessing: float | None  # the accuracy of always answering the most frequent class
    bytes_ratio: float | None
    time_ratio: float | None
    promises: list[str]  # ε in words
    limit: float | None  # the largest ceiling that the user accepts, in the units of the inputs' headline
    note: str  # why a number is missing, or a leak cannot be told from luck

    @property
    def highest_ceiling(self) -> float | None:
        """The largest ceiling of any input; None where one is not known."""
        known = self.ceilings.get("inputs")
        values = known.ceiling if known else []
        return max(value for value in values if value is not None) if values and None not in values else None

    @property
    def leaking(self) -> list[str]:
        return [surface for surface, share in self.leaks.items() if share > 0]


def cells_of(records: Sequence[Record]) -> list[Cell]:
    """One cell for each setting whose cost was measured, in the order of the records."""
    cells = []
    for setting in group_by_setting(records):
        costs = [record for record in setting.records if record.surface == UTILITY]
        if not costs:
            continue
        defenses = costs[0].threat_model.get("defenses") or []
        cost = costs[0]
        guarantees = cost.details.get("guarantees") or []
        cells.append(
            Cell(
                number=len(cells),
                name=setting.name or ", then ".join(map(describe_part, defenses)) or "no defense",
                defended=bool(defenses),
                leaks={s.name: leak for s in surfaces() if (leak := leaked_share(s, setting.records)) is not None},
                ceilings={s.name: known for s in surfaces() if (known := limits_of(s, setting.records)) and known.bound},
                accuracy=_mean(costs, "accuracy"),
                kept=_mean(costs, "accuracy_kept"),
                guessing=cost.details.get("guessing"),
                bytes_ratio=_mean(costs, "bytes_ratio"),
                time_ratio=_mean(costs, "time_ratio"),
                promises=[_promise(g["epsilon"], g["unit"]) for g in guarantees if g.get("epsilon") is not None],
                limit=cost.details.get("largest_ceiling"),
                note="; ".join(filter(None, ("" if cost.outcome == Outcome.COMPLETED else cost.reason, *doubts(setting.records)))),
            )
        )
    return cells


def _promise(epsilon: float, unit: str) -> str:
    too_large = ", too large to protect by itself" if epsilon > LARGEST_PROTECTING_EPSILON else ""
    return f"ε {significant(epsilon)} a {unit}{too_large}"


def leaked_share(surface: Surface[Any], records: Iterable[Record]) -> float | None:
    """How much of a surface leaks, as the surface counts it; None where no method ran and no theorem says that there is nothing."""
    methods = _by_method(surface.name, records)
    attempted = any(verdict_of(record) is not Verdict.NOT_ATTEMPTED for batches in methods for record in batches)
    return surface.leaked_share(methods) if attempted else None


def doubts(records: Sequence[Record]) -> list[str]:
    """For each surface, a sentence where a leak cannot be told from luck, else an empty text."""
    return [surface.doubt(_by_method(surface.name, records)) for surface in surfaces()]


def _by_method(surface: str, records: Iterable[Record]) -> list[list[Record]]:
    """The records of each method, one a batch, without crashes."""
    methods: dict[str, list[Record]] = {}
    for record in records:
        if record.surface == surface and record.outcome != Outcome.CRASHED:
            same = {key: value for key, value in record.config.items() if key not in ("subject", "seed")}
            methods.setdefault(json.dumps([record.method, same], sort_keys=True, default=str), []).append(record)
    return list(methods.values())


def _mean(costs: Sequence[Record], metric: str) -> float | None:
    values = [value for record in costs for value in record.metrics.get(metric, []) if value is not None]
    return sum(values) / len(values) if values else None
