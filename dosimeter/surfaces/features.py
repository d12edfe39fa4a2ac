"""Features: the inputs of the last linear layer, one vector a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dosimeter.engines.identifiability import identifiability
from dosimeter.interfaces import Exposure
from dosimeter.metrics.feature_error import FeatureError
from dosimeter.network.copies import deep_copy
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of, samples_at_once
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator
from dosimeter.registry import FEATURES
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.scores import (
    SAMPLE_NULLS,
    Comparison,
    Nulls,
    Scores,
    Values,
    columns_of,
    keep_finite,
    mark_classmates,
    median,
    no_foreign_null,
    number,
    score_samples,
)
from dosimeter.surfaces.stand_ins import STAND_INS, draw_stand_ins
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, FeatureEstimate

SHARE_OF_NULL = 0.5  # an error below this share of each null's, and of the zero vector's, counts as leaked
LARGEST_CERTIFIED_ERROR = 1e-2  # a certificate is false beyond this error, or beyond its own error bar where that is smaller


@SURFACES.register("features")
class Features(Surface[FeatureEstimate]):
    """What the model computes from each sample just before it decides."""

    position = 20
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
    share_words = "the share with less than half of every null’s error"

    def score(self, found: FeatureEstimate, comparison: Comparison) -> Scores:
        return score_features(found, comparison)

    def judge(self, found: FeatureEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        details = scores.details
        certified, refuted = int(found.certified.sum()), details.get("false_certificates", 0)
        chance, refused = details.get("chance", 1.0), details.get("refused_nulls", {})
        return judge_features(*scores.as_lists(), certified, refuted, chance=chance, attempts=attempts, refused=refused)

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return beats_nulls(value, rivals)

    def proves(self, found: FeatureEstimate) -> bool:
        return bool(found.certified.any())

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
            "identifiability": [identifiability(exposure).sentence],
        }

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


def beats_nulls(error: float | None, rivals: Values) -> bool:
    """Whether a relative error is below half of each rival's, and below half of 1, the error of the zero vector."""
    known = [number(rival, math.inf) for rival in rivals]
    return number(error, math.inf) < SHARE_OF_NULL * min([1.0, *known])


def judge_features(
    found: Mapping[str, Values],
    nulls: Nulls,
    certified: int,
    refuted: int = 0,
    *,
    chance: float,
    attempts: int = 1,
    refused: Mapping[str, str] | None = None,
) -> tuple[Verdict, str]:
    """Features leaked where one is certified, or where the median error beats the median of every null and luck is refuted.

    `chance` is the probability of luck, `attempts` the number of methods tried, `refused` why a null could not be made. Without the
    null of a foreign gradient nothing counts as leaked that is not certified.
    """
    errors = [number(value, math.inf) for value in found.get("feature_error", ())]
    if not errors:
        unmeasured = "their error cannot be measured, since the client's own features cannot be computed again"
        verdict = Verdict.LEAKED if certified else Verdict.NOT_SHOWN
        return verdict, f"{certified} feature vectors certified from the gradient alone; {unmeasured}"
    middle = median(errors)
    if refuted:
        return Verdict.NOT_SHOWN, f"{refuted} of {certified} certificates are refuted by the truth: do not trust this run, and report it"
    if certified:
        counted = f"{certified} of {len(errors)} feature vectors certified from the gradient alone"
        return Verdict.LEAKED, f"{counted}; median relative error {middle:.2g}"
    null_medians = [median([number(value, math.inf) for value in column]) for column in columns_of(nulls, "feature_error")]
    floor = min(null_medians, default=1.0)
    if not beats_nulls(middle, null_medians):
        return Verdict.NOT_SHOWN, f"median relative feature error {middle:.2g} against {floor:.2g} of the best null"
    figures = f"median relative feature error {middle:.2g}, the best null has {floor:.2g}"
    if "foreign" not in nulls:
        return Verdict.NOT_SHOWN, f"{figures}; {no_foreign_null(refused)}"
    luck = luck_words(chance, attempts)
    if correct_for_attempts(chance, attempts) <= LARGEST_CHANCE:
        return Verdict.LEAKED, f"{figures}; {luck}"
    return Verdict.NOT_SHOWN, f"{figures}; {luck}, so this batch does not tell a leak from luck"


def score_features(found: FeatureEstimate, comparison: Comparison) -> Scores:
    """Compare recovered features with those that the exposure's model computes from the private batch."""
    exposure, foreign, auxiliary, truth = comparison.exposure, comparison.foreign, comparison.auxiliary, comparison.truth
    if exposure is None:
        raise ValueError("exposure: scoring features needs the exposure they were recovered from, whose model gives the true ones")
    model = deep_copy(exposure.model)  # a model may keep what it sees, and the exposure is the server's
    head = find_head(exposure).name
    parameter = next(model.parameters())

    def features_of(inputs: Tensor) -> Tensor:
        return input_of(model, head, inputs.to(parameter.device, parameter.dtype))

    def features_in_pieces(inputs: Tensor) -> Tensor:
        at_once = samples_at_once(model, inputs[:1].to(parameter.device, parameter.dtype))
        pieces = inputs.tensor_split(-(-len(inputs) // at_once))  # of nearly equal size
        return torch.cat([features_of(piece) for piece in pieces]).to(torch.float64)

    actual = features_of(truth.inputs)  # (B, H), the whole batch at once, as batch norm in train mode saw it
    for path, estimate in (("found", found), ("foreign", foreign)):
        if estimate is not None and estimate.features.shape[1:] != actual.shape[1:]:
            got = tuple(estimate.features.shape)
            raise ValueError(f"{path}.features: expected (n, {actual.shape[1]}) as the model's last layer takes, got {got}")
    public, stand_ins = None, None
    if auxiliary is None:
        drawn = draw_stand_ins(tuple(truth.inputs.shape[1:]), STAND_INS, generator(0, "stand-ins"))
        scale = comparison.normalization or exposure.public.normalization
        stand_ins = features_in_pieces(from_pixels(drawn, scale))
    else:
        public = features_in_pieces(auxiliary.inputs)
    scores = score_samples(
        "features",
        recovered=found.features.detach().to(actual.device, torch.float64),
        truth=actual.to(torch.float64),
        auxiliary=public,
        foreign=None if foreign is None else foreign.features.detach().to(actual.device, torch.float64),
        blind=("zero", torch.zeros_like(actual, dtype=torch.float64)),
        stand_ins=stand_ins,
        classmates=mark_classmates(truth, auxiliary),
        metrics=comparison.metrics,
    )
    dropping = _drops_units(model)
    if dropping:
        warning = "the model drops units at random in train mode, so that the client's own features cannot be computed again"
        blank = dict.fromkeys(scores.per_metric, warning)
        scores = replace(scores, per_metric={}, nulls={}, unavailable=scores.unavailable | blank, warnings=(*scores.warnings, warning))
    assert scores.assignment is not None
    false = false_certificates(found, actual, truth.targets, scores.assignment)
    counts = {"recovered": len(found.features), "certified": int(found.certified.sum())}
    replaced = any(defense.replaces for defense in exposure.public.defenses)
    if not dropping and not replaced:  # else the truth is not what the client trained on, and refutes nothing
        counts["false_certificates"] = int(false.sum())
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
    """Whether each label is its target, or one of the largest entries of a soft one: (k,) bool."""
    if targets.ndim == 1:
        return labels == targets
    known = labels.clamp(0, targets.shape[1] - 1)
    return (known == labels) & (targets.gather(1, known[:, None])[:, 0] == targets.max(1).values)


def _drops_units(model: nn.Module) -> bool:
    dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(module.training and module.p > 0 for module in dropouts)
