"""Scores: recovered samples are matched one to one with the truth, compared, and set beside their nulls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dosimeter.interfaces import Exposure, Metric
from dosimeter.registry import METRICS
from dosimeter.surfaces.assignment import assign, distances
from dosimeter.types import Batch, Normalization

Values = Sequence[float | None]  # one a sample; None or nan is a miss
Nulls = Mapping[str, Mapping[str, Values]]  # null name -> metric name -> as above

# The nulls of `score_samples`: name on the page, and what it means to a newcomer.
SAMPLE_NULLS = {
    "mean": ("mean", "the average of the samples that the server already had: a blur that anyone can draw"),
    "nearest": ("nearest known", "for each private sample, the most similar one that the server already had"),
    "foreign": ("foreign gradient", "the same attack fed another client’s update: what it invents by itself"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What an estimate is scored against, and what its nulls are made of."""

    truth: Batch
    auxiliary: Batch | None = None
    foreign: Any = None  # what the same method recovers from another client's gradient
    exposure: Exposure | None = None
    normalization: Normalization | None = None  # overrides the estimate's own
    classes: int | None = None
    metrics: Sequence[str | Metric] | None = None  # None: every metric of the surface


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores(Mapping[str, Tensor]):
    """Metric name -> one value a sample, in the truth's order; and the same for every null.

    A truth sample without a partner (fewer were recovered, or what was recovered is not finite) has assignment −1 and nan in
    every metric. It is a miss, and `intervals` ranks a miss below every score.
    """

    surface: str
    per_metric: Mapping[str, Tensor]  # (B,), or (1,) where a metric compares label counts
    nulls: dict[str, dict[str, Tensor]]  # null name -> metric name -> as above
    assignment: Tensor | None  # (B,) index of the recovered sample or −1; None where only label counts were compared
    unavailable: dict[str, str] = field(default_factory=dict)  # metric name -> why it could not be computed
    warnings: tuple[str, ...] = ()  # reasons to trust the values less
    details: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.per_metric[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.per_metric)

    def __len__(self) -> int:
        return len(self.per_metric)

    @property
    def misses(self) -> int:
        """How many truth samples got no partner."""
        return 0 if self.assignment is None else int((self.assignment < 0).sum())

    def as_lists(self) -> tuple[dict[str, list[float | None]], dict[str, dict[str, list[float | None]]]]:
        """The metrics and the nulls as a record holds them."""
        nulls = {null: {name: values.tolist() for name, values in columns.items()} for null, columns in self.nulls.items()}
        return {name: values.tolist() for name, values in self.items()}, nulls


def score_samples(
    surface: str,
    *,
    recovered: Tensor,
    truth: Tensor,
    auxiliary: Tensor | None,
    foreign: Tensor | None,
    blind: tuple[str, Tensor],
    metrics: Sequence[str | Metric] | None,
    own: Mapping[str, Tensor] | None = None,
) -> Scores:
    """Match recovered samples (n, *shape) with the truth (B, *shape) and compare them; do the same for every null.

    `blind` is the null without auxiliary data. `own` are the nulls that the method itself supplies.
    """
    if not truth.isfinite().all():
        raise ValueError(f"truth: has NaN or infinite {surface}, against which nothing can be scored")
    usable, unavailable = choose_metrics(metrics, surface, tuple(truth.shape[1:]))
    assignment = assign(recovered, truth)
    in_order = torch.arange(len(truth), device=truth.device)
    warnings: tuple[str, ...] = ()
    if auxiliary is None:
        nulls = {blind[0]: compare_samples(usable, blind[1], truth, in_order)}
    else:
        nearest = auxiliary[distances(truth, auxiliary).argmin(1)]
        nulls = {
            "mean": compare_samples(usable, auxiliary.mean(0, keepdim=True).expand_as(truth), truth, in_order),
            "nearest": compare_samples(usable, nearest, truth, in_order),
        }
        shared = int((nearest == truth).flatten(1).all(1).sum())
        if shared:
            warnings = (f"{shared} of {len(truth)} private samples are in the auxiliary data too, so that their nearest null is exact",)
    if foreign is not None:
        nulls["foreign"] = compare_samples(usable, foreign, truth, assign(foreign, truth))
    for name, drawn in (own or {}).items():
        nulls[name] = compare_samples(usable, drawn, truth, assign(drawn, truth))
    per_metric = compare_samples(usable, recovered, truth, assignment)
    return Scores(surface=surface, per_metric=per_metric, nulls=nulls, assignment=assignment, unavailable=unavailable, warnings=warnings)


def choose_metrics(
    metrics: Sequence[str | Metric] | None, surface: str, shape: tuple[int, ...] | None
) -> tuple[dict[str, Metric], dict[str, str]]:
    """The metrics of a surface that can be computed here, and why the others cannot."""
    chosen = [METRICS.resolve(metric) for metric in (METRICS.names() if metrics is None else metrics)]
    for metric in chosen:
        if metrics is not None and metric.surface != surface:
            raise ValueError(f"metrics: {metric.name} scores {metric.surface}, but what was recovered are {surface}")
    chosen = [metric for metric in chosen if metric.surface == surface]
    reasons = {metric.name: metric.unavailable(shape) for metric in chosen}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    return {metric.name: metric for metric in chosen if metric.name not in unavailable}, unavailable


def compare_samples(metrics: Mapping[str, Metric], recovered: Tensor, truth: Tensor, assignment: Tensor) -> dict[str, Tensor]:
    """Each metric of each truth sample and its partner, nan without a partner: (B,)."""
    matched = assignment >= 0
    result = {name: torch.full((len(truth),), torch.nan, dtype=torch.float64, device=truth.device) for name in metrics}
    if matched.any():
        partners, wanted = recovered[assignment[matched]], truth[matched]
        for name, metric in metrics.items():
            result[name][matched] = metric(partners, wanted).to(torch.float64)
    return result


def columns_of(nulls: Nulls, metric: str) -> list[Values]:
    """The scores of every null that has the metric."""
    return [columns[metric] for columns in nulls.values() if metric in columns]


def number(value: float | None, missing: float = math.nan) -> float:
    """A score, or `missing` in place of a miss."""
    return missing if value is None or math.isnan(value) else value


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
