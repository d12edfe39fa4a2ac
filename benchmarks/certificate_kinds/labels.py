"""Certified label counts: true where they are the batch's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from head_cases import Case

import dosimeter as dm
from certificate_kinds.configurations import (
    Configuration,
    alike,
    alone,
    confident,
    configurations,
    misdeclared,
    plain,
    true_counts,
    untraced,
)
from certificate_kinds.kind import Kind, Row
from dosimeter.types import LabelEstimate

AUXILIARY = 2  # samples a class, at most, that the server has for cv_matching
MOST_AUXILIARY = 200  # in all


def kinds(data: Path | None) -> list[Kind]:
    every, single = configurations(data), alone()
    traceless = [*untraced(), *confident(data)]
    undefended = [*plain(), *traceless, *alike(), *misdeclared()]
    return [
        *_kinds("labels/subspace", partial(certified_counts, "subspace"), every),
        *_kinds("labels/subspace, in part", proved_part, traceless),
        *_kinds("labels/soft_scalar", partial(certified_counts, "soft_scalar"), single),
        *_kinds("labels/cv_matching", partial(certified_counts, "cv_matching"), undefended),
    ]


def _kinds(name: str, draw, chosen: Sequence[Configuration]) -> list[Kind]:
    return [Kind(name=f"{name}: {one.name}", draw=partial(draw, one), breaks=one.breaks, skipped=one.skipped) for one in chosen]


def certified_counts(method: str, configuration: Configuration, seed: int) -> list[Row]:
    """One row a batch: all of its counts, and its soft labels where the method gives them."""
    case = configuration.draw(seed)
    if method == "cv_matching":
        case = with_auxiliary(case, seed)
    found = dm.recover_labels(case.exposure, method, seed=seed)
    right = is_right(found, case)
    return [Row(certified=found.certified, true=right, recovered=right, samples=len(case.labels), premises=premises_of(found))]


def proved_part(configuration: Configuration, seed: int) -> list[Row]:
    """One row a sample of the counts that are proved where not all are."""
    case = configuration.draw(seed)
    found = dm.recover_labels(case.exposure, "subspace", seed=seed)
    wanted = true_counts(case.labels, len(found.counts))
    proved = found.details.get("proved", found.counts * found.certified).cpu()
    right = int(torch.minimum(proved, wanted).sum())
    others = int(torch.minimum(found.counts.cpu(), wanted).sum()) - right  # guesses that are right
    rows = [
        Row(certified=True, true=place < right, recovered=place < right, premises=premises_of(found)) for place in range(int(proved.sum()))
    ]
    return [*rows, *(Row(certified=False, true=True, recovered=True) for _ in range(max(others, 0)))]


def is_right(found: LabelEstimate, case: Case) -> bool:
    """Whether the counts are the truth's, by the largest entries of soft labels."""
    return torch.equal(found.counts.cpu(), true_counts(case.labels, len(found.counts)).cpu())


def premises_of(found: LabelEstimate) -> tuple[str, ...]:
    return getattr(found, "premises", ())  # estimates of older code have none


def with_auxiliary(case: Case, seed: int) -> Case:
    """The case with random inputs as the server's auxiliary data."""
    exposure = case.exposure
    classes, dtype = exposure.public.classes, next(exposure.model.parameters()).dtype
    labels = torch.arange(classes).repeat(AUXILIARY)[:MOST_AUXILIARY]
    inputs = torch.rand(len(labels), *exposure.public.input_shape, generator=torch.Generator().manual_seed(seed + 77), dtype=dtype)
    return replace(case, exposure=replace(exposure, auxiliary=dm.Batch(inputs, labels)))
