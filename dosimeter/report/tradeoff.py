"""What each defense stops and what it costs: the leak-utility plane, its Pareto front, and what to switch on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dosimeter.report.numbers import THIN, percent, significant
from dosimeter.report.settings import described, group_by_setting
from dosimeter.report.words import enumeration
from dosimeter.types import Outcome, Record
from dosimeter.verdicts import CHANCE, MARGIN_DB, SURFACES, UTILITY, Verdict

SUSPICIOUS = 0.25  # agreement, from guessing to perfect, that is worth a word where luck cannot be ruled out
TOLERATED = 0.9  # of the undefended accuracy that a defense must keep to be advised


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One list of defenses: what leaks behind it, surface by surface, and what it costs."""

    number: int
    name: str
    defended: bool
    leaks: dict[str, float]  # surface -> the share that leaks, for the surfaces that were measured
    accuracy: float | None  # None where the training could not be run
    kept: float | None  # share of the undefended accuracy
    bytes_ratio: float | None
    time_ratio: float | None
    promises: list[str]  # ε in words
    note: str  # why something is missing, or cannot be told

    @property
    def leaking(self) -> list[str]:
        return [surface for surface, share in self.leaks.items() if share > 0]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cell on the plane of one surface."""

    number: int
    across: float  # per cent
    down: float  # pixels from the top
    front: bool
    defended: bool
    title: str


@dataclass(frozen=True, kw_only=True)
class Plane:
    surface: str
    points: list[Point]
    labels: list[tuple[float, float, str]]  # across, down and the numbers of the front's cells that stand there
    segments: list[tuple[float, float, float, float]]  # the front's steps: from and to, across and down
    across_ticks: list[tuple[float, str]]
    down_ticks: list[tuple[float, str]]
    height: float
    summary: str


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    cells: list[Cell]
    planes: list[Plane]
    advice: str


def tradeoff(records: Sequence[Record]) -> Tradeoff | None:
    """None where no record says what a defense costs."""
    cells = cells_of(records)
    if not cells:
        return None
    surfaces = [surface for surface in SURFACES if any(surface in cell.leaks for cell in cells)]
    return Tradeoff(cells=cells, planes=[plane for s in surfaces if (plane := _plane(s, cells))], advice=advice(cells))


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


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of (leak, accuracy) no other point betters: less leak at no less accuracy, or more accuracy at no more leak."""
    return [
        i
        for i, (leak, kept) in enumerate(points)
        if not any(other <= leak and more >= kept and (other < leak or more > kept) for other, more in points)
    ]


def advice(cells: Sequence[Cell]) -> str:
    """In a sentence: what to switch on for this model, what it stops, and what that costs."""
    undefended = next((cell for cell in cells if not cell.defended), None)
    measured = [cell for cell in cells if cell.defended and cell.kept is not None and cell.leaks]
    if not measured:
        return "No defense could be measured here, so there is nothing to advise."
    worst = undefended.leaking if undefended else list(dict.fromkeys(s for cell in measured for s in cell.leaking))
    if not worst:
        return "Nothing leaked without a defense at this budget, so none of these can be told from another by what it stops."
    bearable = [cell for cell in measured if cell.kept is not None and cell.kept >= TOLERATED]
    if not bearable:
        best = max(measured, key=lambda cell: cell.kept or 0.0)
        return (
            f"No defense of this grid keeps {100 * TOLERATED:.0f}{THIN}% of the undefended accuracy; "
            f"{best.name} keeps most, {percent(best.kept)}."
        )
    chosen = min(bearable, key=lambda cell: (len(cell.leaking), sum(cell.leaks.values()), -(cell.kept or 0.0)))
    stopped = [surface for surface in worst if surface not in chosen.leaking]
    if not stopped:
        before = sum(undefended.leaks.values()) if undefended else math.inf
        if sum(chosen.leaks.values()) >= before:
            return (
                f"None of these defenses stops a leak while it keeps {100 * TOLERATED:.0f}{THIN}% of the undefended accuracy: "
                "none is worth switching on for this model alone."
            )
        effect = f"leaks least, though {enumeration(chosen.leaking)} still leak"
    else:
        effect = f"no leak of {enumeration(stopped)} is shown behind it at this budget"
        effect += f", while {enumeration(chosen.leaking)} still leak" if chosen.leaking else ""
    costs = [f"{percent(chosen.kept)} of the accuracy is kept"]
    if chosen.bytes_ratio is not None:
        costs.append(f"an update takes {significant(chosen.bytes_ratio)} times the bytes")
    if chosen.time_ratio is not None:
        costs.append(f"{significant(chosen.time_ratio)} times the client’s time")
    costs.append(f"it promises {enumeration(chosen.promises)}" if chosen.promises else "it promises no ε")
    return f"Switch on {chosen.name}: {effect}; {', '.join(costs)}."


def _plane(surface: str, cells: Sequence[Cell]) -> Plane | None:
    drawn = [(cell, cell.leaks[surface], cell.kept) for cell in cells if surface in cell.leaks and cell.kept is not None]
    if not drawn:
        return None
    kept = [share for _, _, share in drawn]
    low, high = math.floor(10 * min(kept)) / 10, max(1.0, math.ceil(10 * max(kept)) / 10)
    low = low if low < high else low - 0.1
    best = set(front([(leak, share) for _, leak, share in drawn]))
    height = 200.0

    def across(share: float) -> float:
        return round(100 * (share - low) / (high - low), 2)

    def down(leak: float) -> float:
        return round(height * (1 - leak), 1)

    points = [
        Point(
            number=cell.number,
            across=across(share),
            down=down(leak),
            front=i in best,
            defended=cell.defended,
            title=f"{cell.number}. {cell.name}: {percent(leak)} of {surface} leaked, {percent(share)} of the accuracy kept",
        )
        for i, (cell, leak, share) in enumerate(drawn)
    ]
    ends = sorted({(point.across, point.down) for point in points if point.front})
    step = 0.1 if high - low <= 0.5 else 0.2
    ticks = [low + step * i for i in range(math.floor((high - low) / step + 1e-9) + 1)]
    summary = "; ".join(point.title for point in points if point.front)
    return Plane(
        surface=surface,
        points=sorted(points, key=lambda point: point.front),
        labels=[(x, y, ", ".join(str(p.number) for p in points if p.front and (p.across, p.down) == (x, y))) for x, y in ends],
        segments=[part for (x, y), (u, v) in pairwise(ends) for part in ((x, y, x, v), (x, v, u, v))],
        across_ticks=[(across(tick), percent(tick)) for tick in ticks],
        down_ticks=[(down(tick), percent(tick)) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)],
        height=height,
        summary=f"{surface}: on the front are {summary}",
    )


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
