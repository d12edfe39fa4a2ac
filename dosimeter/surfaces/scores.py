"""Scores: recovered samples are matched one to one with the truth, compared, and set beside their nulls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dosimeter.interfaces import Exposure, GalleryMetric, Metric
from dosimeter.metrics.identification import Identification
from dosimeter.registry import METRICS
from dosimeter.surfaces.assignment import assign, distances
from dosimeter.surfaces.gallery import NO_GALLERY, describe_galleries, draw_decoys, identify, split_metrics
from dosimeter.surfaces.luck import chance_of_luck, chance_without_references
from dosimeter.types import Batch, Normalization

Values = Sequence[float | None]  # one a sample; None or nan is a miss
Nulls = Mapping[str, Mapping[str, Values]]  # null name -> metric name -> as above

# How many times nearer to each other than to drawn stand-ins samples of one kind may lie: features of alike pictures are nearly parallel.
KINSHIP = {"features": 30.0, "maps": 30.0}

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
    refused: Mapping[str, str] = field(default_factory=dict)  # null -> why it could not be made
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
    stand_ins: Tensor | None = None,
    classmates: Tensor | None = None,
    metrics: Sequence[str | Metric] | None,
    own: Mapping[str, Tensor] | None = None,
) -> Scores:
    """Match recovered samples (n, *shape) with the truth (B, *shape) and compare them; do the same for every null.

    `blind` is the null without auxiliary data. `own` are the nulls that the method itself supplies. `foreign` has no more guesses
    than were recovered, and passes through the same matching. `details["chance"]` is the probability of luck: see `chance_of_luck`
    for `auxiliary` and its `classmates`, `chance_without_references` for `stand_ins`.
    """
    if not truth.isfinite().all():
        raise ValueError(f"truth: has NaN or infinite {surface}, against which nothing can be scored")
    chosen, unavailable = choose_metrics(metrics, surface, tuple(truth.shape[1:]))
    usable, galleries = split_metrics(chosen)
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
        guesses = keep_finite(foreign)[: len(keep_finite(recovered))]
        nulls["foreign"] = compare_samples(usable, guesses, truth, assign(guesses, truth))
    for name, drawn in (own or {}).items():
        nulls[name] = compare_samples(usable, drawn, truth, assign(drawn, truth))
    chance = 1.0
    if auxiliary is not None:
        apart = ~_held_too(truth, auxiliary)  # a sample that the client holds too is no reference
        chance = chance_of_luck(recovered, truth, auxiliary[apart], None if classmates is None else classmates[apart])
    elif stand_ins is not None:
        chance = chance_without_references(recovered, truth, stand_ins, blind[1][0], kinship=KINSHIP.get(surface, 1.0))
    scores = Scores(
        surface=surface,
        per_metric=compare_samples(usable, recovered, truth, assignment),
        nulls=nulls,
        assignment=assignment,
        unavailable=unavailable,
        warnings=warnings,
        details={"chance": chance},
    )
    if auxiliary is None:
        return replace(scores, unavailable=unavailable | dict.fromkeys(galleries, NO_GALLERY))
    drawn = {"mean": auxiliary.mean(0, keepdim=True), "nearest": auxiliary[distances(truth, auxiliary).argmin(1)], "foreign": foreign}
    return _with_galleries(scores, galleries, recovered, truth, auxiliary, drawn | dict(own or {}))


def _held_too(truth: Tensor, auxiliary: Tensor) -> Tensor:
    """Which auxiliary samples are private ones, bit for bit: a distance of twins is rounded, and not always zero. (N,) bool."""
    return (truth[distances(truth, auxiliary).argmin(0)] == auxiliary).flatten(1).all(1)


def _with_galleries(
    scores: Scores,
    metrics: Mapping[str, GalleryMetric],
    recovered: Tensor,
    truth: Tensor,
    auxiliary: Tensor,
    guesses: Mapping[str, Tensor | None],
) -> Scores:
    """The scores, and each null, with what is picked out of a gallery of auxiliary samples. `details` has what chance would pick."""
    decoys = draw_decoys(auxiliary[~_held_too(truth, auxiliary)])
    if not metrics or not len(decoys):
        return replace(scores, unavailable=scores.unavailable | dict.fromkeys(metrics, NO_GALLERY))
    nulls = {}
    for name, columns in scores.nulls.items():
        drawn = guesses[name]
        assert drawn is not None
        nulls[name] = columns | identify(metrics, drawn, truth, decoys)
    own = [metric for metric in metrics.values() if isinstance(metric, Identification)]
    told = [described for metric in own for described in describe_galleries(metric, recovered, truth, decoys)]
    return replace(
        scores,
        per_metric={**scores.per_metric, **identify(metrics, recovered, truth, decoys)},
        nulls=nulls,
        details=scores.details | {"identification": told},
    )


def in_truths_order(marked: Tensor, assignment: Tensor | None) -> list[bool]:
    """Marks of the recovered samples (n,) bool for the samples of the truth: a sample without a partner has none."""
    if assignment is None or not len(marked):
        return []
    partner = assignment.cpu()
    return ((partner >= 0) & marked.cpu()[partner.clamp(min=0)]).tolist()


def no_foreign_null(refused: Mapping[str, str] | None) -> str:
    """Why the null of a foreign gradient is missing, and what follows."""
    why = (refused or {}).get("foreign", "the same method was not run on a foreign gradient")
    return f"no leak is claimed without a null of the same kind: {why}"


def keep_finite(samples: Tensor) -> Tensor:
    """The samples without a NaN or infinite entry: (m, *shape)."""
    return samples[samples.flatten(1).isfinite().all(1)]


def mark_classmates(truth: Batch, auxiliary: Batch | None) -> Tensor | None:
    """Which auxiliary samples have a class of the truth; None where there are none, or where targets are not single classes: (N,) bool."""
    if auxiliary is None or truth.targets.ndim != 1 or auxiliary.targets.ndim != 1 or truth.targets.is_floating_point():
        return None
    return torch.isin(auxiliary.targets, truth.targets.to(auxiliary.targets))


def choose_metrics(
    metrics: Sequence[str | Metric] | None, surface: str, shape: tuple[int, ...] | None
) -> tuple[dict[str, Metric], dict[str, str]]:
    """The metrics of a surface that can be computed here, and why the others cannot."""
    chosen = [METRICS.resolve(metric) for metric in (METRICS.names() if metrics is None else metrics)]
    for metric in chosen:
        if metrics is not None and metric.surface != surface:
            raise ValueError(f"metrics: {metric.name} scores {metric.surface}, but what was recovered are {surface}")
    chosen = [metric for metric in chosen if metric.surface == surface and (metrics is not None or metric.applies(shape))]
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
