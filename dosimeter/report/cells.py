"""A grid's cells: what leaks behind each list of defenses, surface by surface, and what it costs, read from the records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dosimeter.report.numbers import percent, significant
from dosimeter.report.settings import described, group_by_setting
from dosimeter.surfaces.verdicts import CHANCE, MARGIN_DB, SURFACES, UTILITY, Verdict
from dosimeter.types import Outcome, Record

SUSPICIOUS = 0.25  # agreement, from guessing to perfect, that is worth a word where luck cannot be ruled out


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One list of defenses: what leaks behind it, surface by surface, and what it costs."""

    number: int
    name: str
    defended: bool
    leaks: dict[str, float]  # surface -> the share that leaks, for the surfaces that were measured
    accuracy: float | None  # None where the training could not be run
    kept: float | None  # share of the undefended accuracy
    guessing: float | None  # the accuracy of always saying the most frequent class
    bytes_ratio: float | None
    time_ratio: float | None
    promises: list[str]  # ε in words
    note: str  # why something is missing, or cannot be told

    @property
    def leaking(self) -> list[str]:
        return [surface for surface, share in self.leaks.items() if share > 0]


def cells_of(records: Sequence[Record]) -> list[Cell]:
    """The settings whose cost was measured, in their order; the undefended one first where there is one."""
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
                name=setting.name or ", then ".join(map(described, defenses)) or "no defense",
                defended=bool(defenses),
                leaks={s: leak for s in SURFACES if (leak := leaked_share(s, setting.records)) is not None},
                accuracy=_mean(costs, "accuracy"),
                kept=_mean(costs, "accuracy_kept"),
                guessing=cost.details.get("guessing"),
                bytes_ratio=_mean(costs, "bytes_ratio"),
                time_ratio=_mean(costs, "time_ratio"),
                promises=[f"ε {significant(g['epsilon'])} a {g['unit']}" for g in guarantees if g.get("epsilon") is not None],
                note="; ".join(filter(None, ("" if cost.outcome == Outcome.COMPLETED else cost.reason, undecided(setting.records)))),
            )
        )
    return cells


def leaked_share(surface: str, records: Iterable[Record]) -> float | None:
    """How much of a surface leaks: by the most telling method, the mean over its batches; 0 where none is shown to leak.

    Labels: how far the recovery is from guessing (0) to perfect (1). Features: the share whose error is below half of each
    null's. Inputs: the share that beats every null by the verdict's margin. None where no method was run.
    """
    methods = _by_method(surface, records)
    if not methods:
        return None
    if surface == "labels":
        return max((_mean_agreement(batches) for batches in methods if _beyond_luck(batches, len(methods))), default=0.0)
    share = _feature_share if surface == "features" else _input_share
    return max(sum(share(r) for r in batches if r.verdict == Verdict.LEAKED) / len(batches) for batches in methods)


def undecided(records: Iterable[Record]) -> str:
    """A sentence where the labels look recovered but the batches are too small to tell that from luck; else nothing."""
    methods = _by_method("labels", records)
    if any(_beyond_luck(batches, len(methods)) for batches in methods):
        return ""
    closest = max(methods, key=_mean_agreement, default=[])
    if not closest or _mean_agreement(closest) < SUSPICIOUS:
        return ""
    samples = sum(int(record.threat_model.get("batch_size") or 0) for record in closest)
    agreement = f"{percent(_mean_agreement(closest))} of the way from guessing to perfect"
    return f"labels: {closest[0].method} came {agreement}, which {samples} samples are too few to tell from luck"


def _by_method(surface: str, records: Iterable[Record]) -> list[list[Record]]:
    """The records of each method, one a batch; a crashed one is left out."""
    methods: dict[str, list[Record]] = {}
    for record in records:
        if record.surface == surface and record.outcome != Outcome.CRASHED:
            same = {key: value for key, value in record.config.items() if key not in ("subject", "seed")}
            methods.setdefault(json.dumps([record.method, same], sort_keys=True, default=str), []).append(record)
    return list(methods.values())


def _beyond_luck(batches: Sequence[Record], methods: int) -> bool:
    """Whether the batches together show a leak of labels: one is proved, or luck is refuted by all of them taken together.

    Fisher's method on each batch's probability of luck, times the number of methods tried (Bonferroni).
    """
    if any(record.details.get("certified") for record in batches):
        return True
    chances = [record.details.get("chance") for record in batches]
    if any(chance is None for chance in chances):
        return any(record.verdict == Verdict.LEAKED for record in batches)
    evidence = -sum(math.log(max(float(chance), 1e-300)) for chance in chances if chance is not None)
    terms = [evidence**k / math.factorial(k) for k in range(len(chances))]  # the tail of χ² with 2n degrees, at twice the evidence
    return methods * math.exp(-evidence) * sum(terms) <= CHANCE


def _mean_agreement(batches: Sequence[Record]) -> float:
    return sum(_label_share(record) for record in batches) / len(batches)


def _label_share(record: Record) -> float:
    if not record.metrics:
        return 0.0
    found, guessed = record.metrics["insacc"][0] or 0.0, record.nulls["prior"]["insacc"][0] or 0.0
    return max(0.0, (found - guessed) / (1 - guessed)) if guessed < 1 else 0.0


def _feature_share(record: Record) -> float:
    errors = record.metrics["feature_error"]
    nulls = [columns["feature_error"] for columns in record.nulls.values() if "feature_error" in columns]
    rivals = [min([1.0, *(v for v in values if v is not None)]) for values in zip(*nulls)] or [1.0] * len(errors)
    return sum(error is not None and error < 0.5 * rival for error, rival in zip(errors, rivals)) / len(errors)


def _input_share(record: Record) -> float:
    scores = record.metrics["psnr"]
    nulls = [columns["psnr"] for columns in record.nulls.values() if "psnr" in columns]
    rivals = [max((v for v in values if v is not None), default=-math.inf) for values in zip(*nulls)]
    return sum(score is not None and score >= rival + MARGIN_DB for score, rival in zip(scores, rivals)) / len(scores)


def _mean(costs: Sequence[Record], metric: str) -> float | None:
    values = [value for record in costs for value in record.metrics.get(metric, []) if value is not None]
    return sum(values) / len(values) if values else None
