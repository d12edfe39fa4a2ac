"""Certified label counts: true where they are the batch's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

import dosimeter as dm
from certificate_kinds.configurations import Configuration, configurations, true_counts
from certificate_kinds.kind import Kind, Row


def kinds(data: Path | None) -> list[Kind]:
    return [
        Kind(
            name=f"labels/{method}: {one.name}",
            draw=partial(certified_counts, method, one),
            breaks=one.breaks,
            skipped=one.skipped,
        )
        for method in ("subspace",)
        for one in configurations(data)
    ]


def certified_counts(method: str, configuration: Configuration, seed: int) -> list[Row]:
    """One row a batch."""
    case = configuration.draw(seed)
    found = dm.recover_labels(case.exposure, method, seed=seed)
    right = torch.equal(found.counts.cpu(), true_counts(case.labels, len(found.counts)).cpu())
    premises = getattr(found, "premises", ())
    return [Row(certified=found.certified, true=right, recovered=right, samples=len(case.labels), premises=premises)]
