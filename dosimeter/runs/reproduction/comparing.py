"""Published numbers against measured ones: a verdict on each number and on each law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from dosimeter.runs.reproduction.quantities import Trial, figure_of, is_error
from dosimeter.runs.reproduction.tables import Law, Row, Table
from dosimeter.types import Record

Records = Mapping[tuple[str, str], Sequence[Trial]]  # (row, column) -> one a trial


ROUNDING = 1e-9  # a tolerance of .02 around 1 includes .98 in spite of binary rounding


class Agreement(StrEnum):
    """How a measured number stands to the published one."""

    REPRODUCED = "reproduced"
    ABOVE = "above"
    BELOW = "below"
    UNPUBLISHED = "no published number"
    REFUSED = "refused"  # the method declined, with a reason
    NOT_REPRODUCED = "not reproduced"  # of a law
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the table."""

    row: str
    column: str
    quantity: str
    published: float | None
    measured: float | None
    standard_error: float | None
    trials: int
    verdict: Agreement
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LawResult:
    """One law with the numbers that it was judged on."""

    says: str
    quantity: str
    column: str
    verdict: Agreement
    numbers: dict[str, float | None]  # by row
    reason: str = ""


def compare_row(row: Row, records: Records) -> list[Cell]:
    cells = []
    for column in row.columns:
        found = records.get((row.name, column), ())
        for quantity in dict.fromkeys([*row.published.get(column, {}), *row.show]):
            cells.append(_cell(row, column, quantity, found))
    return cells


def judge_laws(table: Table, records: Records) -> list[LawResult]:
    return [_judge(law, [row for row in table.rows if not row.skip and fnmatchcase(row.name, law.rows)], records) for law in table.laws]


def _cell(row: Row, column: str, quantity: str, records: Sequence[Trial]) -> Cell:
    published = row.published.get(column, {}).get(quantity)
    figure = figure_of(quantity, records)
    reason = next((record.reason for record in records if isinstance(record, Record) and not record.metrics), "")
    if row.skip:
        figure, verdict, reason = None, Agreement.SKIPPED, row.skip
    elif figure is None:
        verdict, reason = Agreement.REFUSED, reason or "no trial gave this quantity"
    else:
        verdict = _agreement(row, quantity, published, figure.mean)
    return Cell(
        row=row.name,
        column=column,
        quantity=quantity,
        published=published,
        measured=None if figure is None else figure.mean,
        standard_error=None if figure is None else figure.standard_error,
        trials=0 if figure is None else figure.trials,
        verdict=verdict,
        reason=reason,
    )


def _agreement(row: Row, quantity: str, published: float | None, measured: float) -> Agreement:
    if published is None:
        return Agreement.UNPUBLISHED
    if is_error(quantity):
        low, high = published / row.factor, published * row.factor
    else:
        low, high = published - row.tolerance, published + row.tolerance
    slack = ROUNDING * max(1.0, abs(published))
    return Agreement.BELOW if measured < low - slack else Agreement.ABOVE if measured > high + slack else Agreement.REPRODUCED


def _judge(law: Law, rows: Sequence[Row], records: Records) -> LawResult:
    def number(row: Row, column: str) -> float | None:
        figure = figure_of(law.quantity, records.get((row.name, column), ()))
        return None if figure is None else figure.mean

    slack = law.slack + ROUNDING
    numbers = {row.name: number(row, law.column) for row in rows if law.column in row.columns}
    known = {name: value for name, value in numbers.items() if value is not None}
    failures = [f"{name}: refused" for name, value in numbers.items() if value is None]
    if law.at_least is not None:
        failures += [f"{name}: {value:.3g}, below {law.at_least:g}" for name, value in known.items() if value < law.at_least - slack]
    if law.at_most is not None:
        failures += [f"{name}: {value:.3g}, above {law.at_most:g}" for name, value in known.items() if value > law.at_most + slack]
    if law.order is not None:
        sign = 1 if law.order == "rising" else -1
        steps = zip(known.items(), list(known.items())[1:])
        failures += [f"{b}: {y:.3g} after {x:.3g}" for (_, x), (b, y) in steps if sign * (y - x) < -slack]
    for rival in law.above:
        for row in rows:
            other, own = number(row, rival) if rival in row.columns else None, known.get(row.name)
            if own is not None and other is not None and own < other - slack:
                failures.append(f"{row.name}: {own:.3g}, {rival} has {other:.3g}")
    verdict = Agreement.NOT_REPRODUCED if failures else Agreement.REPRODUCED if known else Agreement.SKIPPED
    return LawResult(says=law.says, quantity=law.quantity, column=law.column, verdict=verdict, numbers=numbers, reason="; ".join(failures))
