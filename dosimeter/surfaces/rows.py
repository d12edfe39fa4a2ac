"""Rows of a table with declared columns: their scores, verdict and words. Pictures and signals have theirs in `inputs`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dosimeter.columns import Columns
from dosimeter.metrics.columns_right import ColumnsRight
from dosimeter.normalization import to_pixels
from dosimeter.numbers import percent
from dosimeter.randomness import generator
from dosimeter.registry import METRICS
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.scores import (
    Comparison,
    Nulls,
    Scores,
    Values,
    columns_of,
    mark_classmates,
    median,
    no_foreign_null,
    number,
    score_samples,
)
from dosimeter.surfaces.stand_ins import STAND_INS, draw_stand_ins
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Reconstruction

METRIC = "columns_right"
NO_SIGNAL = "compares pictures and signals, and these are rows of a table"
SLACK = 1e-3  # of a column's range, by which rounding may move a value beyond it
MARGIN = 0.1  # a row counts as leaked if so many more of its columns are right than of each of its nulls


def score_rows(found: Reconstruction, comparison: Comparison, columns: Columns) -> Scores:
    """Compare recovered rows, and the nulls, with the true rows, column by column."""
    truth, auxiliary, foreign = comparison.truth, comparison.auxiliary, comparison.foreign

    def rows(inputs: Tensor, path: str) -> Tensor:
        if inputs.ndim != 2 or inputs.shape[1] != sum(columns.sizes):
            raise ValueError(f"{path}: expected rows of {sum(columns.sizes)} inputs, as declared by Columns, got {tuple(inputs.shape)}")
        return columns.as_scores(to_pixels(inputs.detach().to(found.inputs.device, torch.float64), columns))

    wanted = rows(truth.inputs, "truth.inputs")
    asked = METRICS.names() if comparison.metrics is None else [METRICS.resolve(metric).name for metric in comparison.metrics]
    others = [name for name in asked if name != METRIC and METRICS.build(name).surface == "inputs"]
    middle = columns.as_scores(torch.full_like(wanted, 0.5))
    stand_ins = draw_stand_ins(tuple(wanted.shape[1:]), STAND_INS, generator(0, "stand-ins")).to(wanted)
    scores = score_samples(
        "inputs",
        recovered=rows(found.inputs, "found.inputs"),
        truth=wanted,
        auxiliary=None if auxiliary is None else rows(auxiliary.inputs, "auxiliary.inputs"),
        foreign=None if foreign is None else rows(foreign.inputs, "foreign.inputs"),
        own={name: rows(inputs, f"found.nulls[{name!r}]") for name, inputs in found.nulls.items()},
        blind=("middle", middle),
        stand_ins=columns.as_scores(stand_ins),
        classmates=mark_classmates(truth, auxiliary),
        metrics=[ColumnsRight(sizes=columns.sizes)],
    )
    outside = _outside(to_pixels(truth.inputs.double(), columns), columns)
    warning = (f"private values of {', '.join(outside)} lie outside of the declared range",) if outside else ()
    return replace(scores, unavailable=dict.fromkeys(others, NO_SIGNAL), warnings=(*scores.warnings, *warning))


def _outside(places: Tensor, columns: Columns) -> list[str]:
    """The columns in which a value lies outside of its range."""
    beyond = ((places < -SLACK) | (places > 1 + SLACK)).any(0)
    return [name for name, part in zip(columns.columns, beyond.split(columns.sizes)) if bool(part.any())]


def beats_nulls(share: float | None, rivals: Values) -> bool:
    """Whether one row counts as leaked: more of its columns are right than of each null, by the margin. Without a null it never does."""
    known = [number(rival) for rival in rivals if not math.isnan(number(rival))]
    value = number(share, -math.inf)
    return bool(known) and value >= max(known) + MARGIN


def judge_rows(
    found: Mapping[str, Values], nulls: Nulls, *, chance: float, attempts: int = 1, refused: Mapping[str, str] | None = None
) -> tuple[Verdict, str]:
    """Rows leaked where at least one row beats each of its own nulls, and luck is refuted. The null of a foreign gradient must be there."""
    shares = [number(value, -math.inf) for value in found[METRIC]]
    rivals: Sequence[tuple[float | None, ...]] = list(zip(*columns_of(nulls, METRIC)))
    best = [max(number(value, -math.inf) for value in column) for column in rivals]
    above = sum(map(beats_nulls, shares, rivals))
    given = [(value, rival) for value, rival in zip(shares, best) if value > -math.inf]
    if not given:
        return Verdict.NOT_SHOWN, f"none of {len(shares)} rows came back"
    middle, rival = (median(column) for column in zip(*given))
    figures = f"{percent(middle)} of a row’s columns right in the median, against {percent(rival)} of its best null"
    if len(given) < len(shares):
        figures = f"{len(given)} came back, {figures}"
    if not above:
        return Verdict.NOT_SHOWN, f"no row beats its nulls by a tenth of its columns; {figures}"
    figures = f"{above} of {len(shares)} rows beat every null by a tenth of their columns or more; {figures}"
    if "foreign" not in nulls:
        return Verdict.NOT_SHOWN, f"{figures}; {no_foreign_null(refused)}"
    luck = luck_words(chance, attempts)
    if correct_for_attempts(chance, attempts) <= LARGEST_CHANCE:
        return Verdict.LEAKED, f"{figures}; {luck}"
    return Verdict.NOT_SHOWN, f"{figures}; {luck}, so this batch does not tell a leak from luck"
