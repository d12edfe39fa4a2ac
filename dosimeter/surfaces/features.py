"""Features: the inputs of the last linear layer, one vector a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dosimeter.engines.identifiability import identifiability
from dosimeter.interfaces import Exposure
from dosimeter.metrics.feature_error import FeatureError
from dosimeter.network.head import find_head
from dosimeter.registry import FEATURES
from dosimeter.surfaces.layer_inputs import (
    LARGEST_CERTIFIED_ERROR,
    beats_nulls,
    can_refute,
    drops_units,
    judge_errors,
    may_leak,
    reader_of,
    score_layer,
)
from dosimeter.surfaces.pictures import MOST_PICTURES, score_of, strips
from dosimeter.surfaces.scores import SAMPLE_NULLS, Comparison, Scores, Values, in_truths_order, keep_finite
from dosimeter.surfaces.several_labels import as_class_ids
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, Evidence, FeatureEstimate


@SURFACES.register("features")
class Features(Surface[FeatureEstimate]):
    """What the model computes from each sample just before it decides."""

    position = 20
    reads = ("numbers", "regressions", "texts")
    estimate = FeatureEstimate
    methods = FEATURES
    key = plural = "features"
    needs_head = True
    grid_methods: ClassVar = {"subspace": {}, "quotient": {}}
    headline = "feature_error"
    plot = "errors"

    description = (
        "The numbers that the model computes of each sample just before it decides. They identify a sample much as a fingerprint "
        "does: they can be compared, matched with known people, and often turned back into the sample."
    )
    if_leaked = "The server can compute the model’s inner description of single private samples, and compare or match them."
    if_not_shown = "What was tried here came no closer to the private features than its nulls. That is no proof of safety."
    null_words: ClassVar = SAMPLE_NULLS | {"zero": ("zero", "a vector of zeros, which needs no knowledge at all")}
    without_ceiling = "the bounds on inputs limit no single function of an input, which noise may leave whole"
    share_words = "the share with less than half of every null’s error"

    def score(self, found: FeatureEstimate, comparison: Comparison) -> Scores:
        return score_features(found, comparison)

    def judge(self, found: FeatureEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        return judge_errors("feature", "feature vectors", scores, certified=int(found.certified.sum()), attempts=attempts)

    def may_leak(self, found: FeatureEstimate, scores: Scores) -> bool:
        return may_leak("feature", scores, int(found.certified.sum()))

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return beats_nulls(value, rivals)

    def proves(self, found: FeatureEstimate) -> bool:
        return bool(found.certified.any())

    def proof(self, found: FeatureEstimate) -> str:
        certified = int(found.certified.sum())
        return f"{certified} of {len(found.features)} feature vectors certified from the update alone" if certified else ""

    def proved_samples(self, found: FeatureEstimate, scores: Scores) -> list[bool]:
        return in_truths_order(found.certified, scores.assignment)

    def without_proof(self, found: FeatureEstimate, message: str) -> FeatureEstimate:
        return replace(found, certified=torch.zeros_like(found.certified), premises=(), message=message)

    def count_guesses(self, found: FeatureEstimate) -> int:
        return len(keep_finite(found.features))

    def merge(self, estimates: Sequence[FeatureEstimate], count: int) -> FeatureEstimate:
        features = torch.cat([keep_finite(estimate.features) for estimate in estimates])[:count]
        unknown = torch.full((len(features),), -1, device=features.device)
        bare = torch.zeros(len(features), dtype=torch.bool, device=features.device)
        return FeatureEstimate(features=features, labels=unknown, residual=torch.full_like(features[:, 0], torch.nan), certified=bare)

    def details(self, found: FeatureEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        return {
            "certified": int(found.certified.sum()),
            "complete": found.complete,
            "batch_size": found.batch_size,
            "identifiability": [identifiability(exposure, inner=False).sentence],
        }

    def evidence(self, found: FeatureEstimate, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        if comparison is None or scores is None or comparison.exposure is None:
            drawn = strips(list(found.features[:MOST_PICTURES])) if len(found.features) else []
            return [Evidence(kind="tiles", recovered=strip, sample=i) for i, strip in enumerate(drawn)]
        exposure = comparison.exposure
        true = reader_of(exposure, find_head(exposure, closings=True).name)(comparison.truth.inputs)
        known = not drops_units(exposure.model)
        assert scores.assignment is not None
        shown = []
        for i, partner in enumerate(scores.assignment[:MOST_PICTURES].tolist()):
            private, recovered = strips([true[i], found.features[partner].to(true) if partner >= 0 else None])
            score = score_of(scores, "feature_error", i)
            shown.append(Evidence(kind="tiles", private=private if known else None, recovered=recovered, sample=i, score=score))
        return shown

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        facts = []
        certified, false = details.get("certified"), details.get("false_certificates")
        if isinstance(certified, int):
            facts.append(f"{certified} certified from the gradient alone" + (f", {false} of them wrongly" if false else ""))
        if details.get("batch_size") is not None:
            facts.append(f"batch size {details['batch_size']} read off the gradient")
        if details.get("complete") is not None:
            facts.append("the whole gradient is accounted for" if details["complete"] else "a part of the gradient is not accounted for")
        return facts


def score_features(found: FeatureEstimate, comparison: Comparison) -> Scores:
    """Compare recovered features with those that the exposure's model computes from the private batch."""
    exposure, foreign, truth = comparison.exposure, comparison.foreign, comparison.truth
    if exposure is None:
        raise ValueError("exposure: scoring features needs the exposure they were recovered from, whose model gives the true ones")
    read = reader_of(exposure, find_head(exposure, closings=True).name)
    actual = read(truth.inputs)  # (B, H), the whole batch at once, as batch norm in train mode saw it
    for path, estimate in (("found", found), ("foreign", foreign)):
        if estimate is not None and estimate.features.shape[1:] != actual.shape[1:]:
            got = tuple(estimate.features.shape)
            raise ValueError(f"{path}.features: expected (n, {actual.shape[1]}) as the model's last layer takes, got {got}")
    scores = score_layer("features", found.features, actual, None if foreign is None else foreign.features, read, comparison)
    assert scores.assignment is not None
    counts = {"recovered": len(found.features), "certified": int(found.certified.sum())}
    if can_refute(exposure):
        counts["false_certificates"] = int(false_certificates(found, actual, as_class_ids(truth.targets), scores.assignment).sum())
    return replace(scores, details=scores.details | counts)


def false_certificates(found: FeatureEstimate, features: Tensor, targets: Tensor, assignment: Tensor) -> Tensor:
    """Which recovered samples are certified and refuted by the truth: (n,) bool.

    A certificate is false where its sample has no partner among the true `features` (B, H), a feature error above
    `LARGEST_CERTIFIED_ERROR` or its own error bar plus rounding, or a label that is not the truth's largest.
    """
    device = features.device
    matched = assignment >= 0
    partners = assignment[matched]
    error = torch.full((len(found.features),), torch.inf, dtype=torch.float64, device=device)
    error[partners] = FeatureError()(found.features.detach().to(device)[partners], features[matched])
    limit = torch.full_like(error, LARGEST_CERTIFIED_ERROR)
    if found.error_bar is not None:
        limit = torch.minimum(limit, found.error_bar.to(limit) + 8 * torch.finfo(features.dtype).eps)
    right = torch.zeros(len(found.features), dtype=torch.bool, device=device)
    right[partners] = _agree(found.labels.to(device)[partners], targets.to(device)[matched])
    return found.certified.to(device) & ~((error <= limit) & right)


def _agree(labels: Tensor, targets: Tensor) -> Tensor:
    """Whether each label is its target, or one of the largest entries of a soft one: (k,) bool. A label of −1 claims nothing."""
    if targets.ndim == 1:
        return (labels == targets) | (labels < 0)
    known = labels.clamp(0, targets.shape[1] - 1)
    return (labels < 0) | (known == labels) & (targets.gather(1, known[:, None])[:, 0] == targets.max(1).values)
