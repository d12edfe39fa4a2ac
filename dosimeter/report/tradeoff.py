"""What each defense stops and costs: the plane of leak and accuracy, its Pareto front, and the advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dosimeter.numbers import THIN, percent, significant
from dosimeter.report.cells import Cell, cells_of
from dosimeter.report.scores import score
from dosimeter.report.words import enumeration
from dosimeter.surfaces.surface import surface_names
from dosimeter.types import Record

METRIC = "psnr"  # of the ceilings on inputs
LABEL_OVERLAP = (9.0, 14.0)  # per cent across and pixels down within which the numbers of two cells would overlap
LEAST_LEARNED = 0.1  # between guessing (0) and perfect (1): an undefended training below this is no measure of accuracy
LEAST_ACCURACY_KEPT = 0.9  # share of the undefended accuracy that an advised defense must keep


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
    """The cells, planes and advice of a grid; None where no record has a defense's cost."""
    cells = cells_of(records)
    if not cells:
        return None
    surfaces = [surface for surface in surface_names() if any(surface in cell.leaks for cell in cells)]
    return Tradeoff(cells=cells, planes=[plane for s in surfaces if (plane := _plane(s, cells))], advice=advice(cells))


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the Pareto front of (leak, accuracy): no other point has less leak and more accuracy, or one at equal other."""
    return [
        i
        for i, (leak, kept) in enumerate(points)
        if not any(other <= leak and more >= kept and (other < leak or more > kept) for other, more in points)
    ]


def advice(cells: Sequence[Cell]) -> str:
    """The advice in words: which defense to switch on, what it stops and costs, what would stop more, and any doubt."""
    undefended = next((cell for cell in cells if not cell.defended), None)
    return _recommendation(cells, undefended) + _safest_choice(cells) + _training_caveat(undefended)


def _training_caveat(undefended: Cell | None) -> str:
    """A sentence where the undefended training learned too little to measure accuracy by; else an empty text."""
    if undefended is None or undefended.accuracy is None or undefended.guessing is None:
        return ""
    if undefended.accuracy - undefended.guessing >= LEAST_LEARNED * (1 - undefended.guessing):
        return ""
    return (
        f" Without any defense the training reached an accuracy of {percent(undefended.accuracy)} only, guessing gives "
        f"{percent(undefended.guessing)}: what is kept of it says little, so give it more rounds (federation.rounds)."
    )


def _recommendation(cells: Sequence[Cell], undefended: Cell | None) -> str:
    measured = [cell for cell in cells if cell.defended and cell.kept is not None and cell.leaks]
    if not measured:
        return "No defense could be measured here, so there is nothing to advise."
    worst = undefended.leaking if undefended else list(dict.fromkeys(s for cell in measured for s in cell.leaking))
    if not worst:
        return "Nothing leaked without a defense at this budget, so none of these can be told from another by what it stops."
    bearable = [cell for cell in measured if cell.kept is not None and cell.kept >= LEAST_ACCURACY_KEPT]
    if not bearable:
        best = max(measured, key=lambda cell: cell.kept or 0.0)
        return (
            f"No defense of this grid keeps {100 * LEAST_ACCURACY_KEPT:.0f}{THIN}% of the undefended accuracy; "
            f"{best.name} keeps most, {percent(best.kept)}.{_stricter_choice(measured, worst, len(worst))}"
        )
    chosen = min(bearable, key=lambda cell: (len(_open_surfaces(cell, worst)), sum(cell.leaks.values()), -(cell.kept or 0.0)))
    stricter = _stricter_choice(measured, worst, len(_open_surfaces(chosen, worst)))
    stopped = [surface for surface in worst if surface not in _open_surfaces(chosen, worst)]
    if not stopped:
        before = sum(undefended.leaks.values()) if undefended else math.inf
        if sum(chosen.leaks.values()) >= before:
            return (
                f"None of these defenses stops a leak while it keeps {100 * LEAST_ACCURACY_KEPT:.0f}{THIN}% of the undefended accuracy: "
                f"none is worth switching on for this model alone.{stricter}"
            )
        effect = f"leaks least, though {enumeration(chosen.leaking)} still leak"
    else:
        elsewhere = {surface for cell in cells for surface in cell.leaking}
        closed = [surface for surface in surface_names() if chosen.leaks.get(surface) == 0 and surface in {*worst, *elsewhere}]
        effect = f"no leak of {enumeration(closed)} is shown behind it at this budget"
        effect += f", while {enumeration(chosen.leaking)} still leak" if chosen.leaking else ""
    doubt = f" ({chosen.note})" if chosen.note else ""
    return f"Switch on {chosen.name}: {effect}{doubt}; {_price(chosen)}.{stricter}"


def _open_surfaces(cell: Cell, worst: Sequence[str]) -> list[str]:
    """The surfaces that leak behind a cell's defenses, and those that leak undefended and were not measured in the cell."""
    return [surface for surface in surface_names() if cell.leaks.get(surface, float(surface in worst)) > 0]


def _stricter_choice(measured: Sequence[Cell], worst: Sequence[str], still_open: int) -> str:
    """A sentence on a costlier defense that leaves fewer surfaces open than the advised one; else an empty text."""
    cell = min(measured, key=lambda cell: (len(_open_surfaces(cell, worst)), -(cell.kept or 0.0)))
    left = _open_surfaces(cell, worst)
    if len(left) >= still_open:
        return ""
    closed = [surface for surface in worst if surface not in left]
    shown = f"no leak of {enumeration(closed)} is shown" if left else "no leak is shown at all"
    return f" Behind {cell.name} {shown}, but there {_price(cell)}."


def _safest_choice(cells: Sequence[Cell]) -> str:
    """A sentence on the cheapest defense whose ceiling, and not only our attacks, stays below the user's limit."""
    bounded = [(cell, top) for cell in cells if cell.defended and cell.limit is not None and (top := cell.highest_ceiling) is not None]
    if not bounded:
        return ""
    limit = score(bounded[0][0].limit, METRIC)
    below = [(cell, top) for cell, top in bounded if top <= (cell.limit or 0.0) and cell.kept is not None]
    if not below:
        cell, top = min(bounded, key=lambda pair: pair[1])
        return (
            f" No defense of this grid keeps every attacker below {limit}: the lowest ceiling is {score(top, METRIC)}, behind {cell.name}."
        )
    cell, top = max(below, key=lambda pair: pair[0].kept or 0.0)
    kind = "proved" if cell.ceilings["inputs"].theorem else "an estimate"
    ceiling = f"the ceiling is {score(top, METRIC)} ({cell.ceilings['inputs'].bound}, {kind})"
    return f" To keep every attacker on the inputs below {limit}, the cheapest is {cell.name}: {ceiling}, and {_price(cell)}."


def _price(cell: Cell) -> str:
    costs = [f"{percent(cell.kept)} of the accuracy is kept"]
    if cell.bytes_ratio is not None:
        costs.append(f"an update takes {significant(cell.bytes_ratio)} times the bytes")
    if cell.time_ratio is not None:
        costs.append(f"{significant(cell.time_ratio)} times the client’s time")
    costs.append(f"and it promises {enumeration(cell.promises)}" if cell.promises else "and it promises no ε")
    return ", ".join(costs)


def _label_places(points: Sequence[Point]) -> list[tuple[float, float, str]]:
    """The positions of the front's numbers. Cells that stand close together share one position."""
    places: list[tuple[float, float, list[int]]] = []
    for point in sorted(points, key=lambda point: (point.across, point.down, point.number)):
        if places and point.across - places[-1][0] < LABEL_OVERLAP[0] and abs(point.down - places[-1][1]) < LABEL_OVERLAP[1]:
            places[-1][2].append(point.number)
        else:
            places.append((point.across, point.down, [point.number]))
    return [(across, down, ", ".join(map(str, numbers))) for across, down, numbers in places]


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
        labels=_label_places([point for point in points if point.front]),
        segments=[part for (x, y), (u, v) in pairwise(ends) for part in ((x, y, x, v), (x, v, u, v))],
        across_ticks=[(across(tick), percent(tick)) for tick in ticks],
        down_ticks=[(down(tick), percent(tick)) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)],
        height=height,
        summary=f"{surface}: on the front are {summary}",
    )
