"""Targets: the numbers that a regression is trained on, one or several a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Exposure, Public, Recovery
from dosimeter.numbers import significant
from dosimeter.registry import TARGETS
from dosimeter.surfaces.layer_inputs import beats_nulls, judge_errors, may_leak
from dosimeter.surfaces.pictures import MOST_PICTURES, score_of
from dosimeter.surfaces.scores import SAMPLE_NULLS, Comparison, Scores, Values, score_samples
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, Evidence, Refused, TargetEstimate

ROUNDINGS = 64  # units of the true targets' precision by which a certified target may miss beside its error bar
MOST_OUTPUTS = 16  # in the table of evidence


@SURFACES.register("targets")
class Targets(Surface[TargetEstimate]):
    """The number that each sample of a regression is to be given."""

    position = 16
    reads = ("regressions",)
    estimate = TargetEstimate
    methods = TARGETS
    key = plural = "targets"
    needs_head = True
    grid_methods: ClassVar = {"head_slopes": {}}
    headline = "target_error"
    plot = "errors"
    takes_labels = False

    description = "The numbers that the model learns to predict: an age, a price, a blood value. They can themselves be the secret."
    if_leaked = "Whoever runs the server reads private values of single samples off one update."
    if_not_shown = "What was tried here came no closer to the private values than its nulls. That is no proof of safety."
    null_words: ClassVar = SAMPLE_NULLS | {"zero": ("zero", "a target of zero, which needs no knowledge at all")}
    without_ceiling = "no bound on targets that are numbers is built in"
    share_words = "the share with less than half of every null’s error"

    def check_reads(self, method: Recovery, public: Public) -> None:
        if public.loss.target_kind() != "numbers":
            raise Refused(
                f"{method.name} looks for numbers, and the targets of {public.loss.name} are classes; dm.recover_labels reads them"
            )
        if public.positions:
            raise Refused(f"{method.name} reads one output a sample, and this model has one at each place or position")

    def score(self, found: TargetEstimate, comparison: Comparison) -> Scores:
        return score_targets(found, comparison)

    def judge(self, found: TargetEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        return judge_errors("target", "targets", scores, certified=int(found.certified.sum()), attempts=attempts)

    def may_leak(self, found: TargetEstimate, scores: Scores) -> bool:
        return may_leak("target", scores, int(found.certified.sum()))

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return beats_nulls(value, rivals)

    def proves(self, found: TargetEstimate) -> bool:
        return bool(found.certified.any())

    def proof(self, found: TargetEstimate) -> str:
        certified = int(found.certified.sum())
        return f"{certified} of {len(found.targets)} targets certified from the update alone" if certified else ""

    def without_proof(self, found: TargetEstimate, message: str) -> TargetEstimate:
        return replace(found, certified=torch.zeros_like(found.certified), premises=(), message=message)

    def count_guesses(self, found: TargetEstimate) -> int:
        return len(found.targets)

    def details(self, found: TargetEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        return {"certified": int(found.certified.sum()), "recovered": len(found.targets)}

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        certified, false = details.get("certified"), details.get("false_certificates")
        if not isinstance(certified, int):
            return []
        return [f"{certified} certified from the gradient alone" + (f", {false} of them wrongly" if false else "")]

    def evidence(self, found: TargetEstimate, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        if comparison is None or scores is None or scores.assignment is None:
            return [Evidence(kind="table", recovered=_table(row), sample=i) for i, row in enumerate(found.targets[:MOST_PICTURES])]
        return [
            Evidence(
                kind="table",
                private=_table(comparison.truth.targets[i]),
                recovered=_table(found.targets[partner]) if partner >= 0 else None,
                sample=i,
                score=score_of(scores, "target_error", i),
            )
            for i, partner in enumerate(scores.assignment[:MOST_PICTURES].tolist())
        ]


def score_targets(found: TargetEstimate, comparison: Comparison) -> Scores:
    """Compare recovered targets with the private ones, in their own units."""
    truth, auxiliary, foreign = comparison.truth.targets, comparison.auxiliary, comparison.foreign
    if not truth.is_floating_point() or truth.shape[1:] != found.targets.shape[1:]:
        raise ValueError(f"truth.targets: expected numbers of shape (B, {', '.join(map(str, found.targets.shape[1:]))}), got {truth.dtype}")

    def rows(targets: Tensor) -> Tensor:
        return targets.detach().to(found.targets.device, torch.float64).reshape(len(targets), -1)

    true = rows(truth)
    scores = score_samples(
        "targets",
        recovered=rows(found.targets),
        truth=true,
        auxiliary=None if auxiliary is None else rows(auxiliary.targets),
        foreign=None if foreign is None else rows(foreign.targets),
        blind=("zero", torch.zeros_like(true)),
        metrics=comparison.metrics,
    )
    exposure = comparison.exposure
    if exposure is not None and any(defense.replaces for defense in exposure.public.defenses):
        return scores
    assert scores.assignment is not None
    false = false_certificates(found, true, scores.assignment, torch.finfo(truth.dtype).eps)
    return replace(scores, details=scores.details | {"false_certificates": int(false.sum())})


def false_certificates(found: TargetEstimate, true: Tensor, assignment: Tensor, unit: float) -> Tensor:
    """Which recovered targets are certified and farther from the true ones (B, K) than their error bars: (n,) bool."""
    matched = assignment >= 0
    partners = assignment[matched]
    errors = torch.full((len(found.targets),), torch.inf, dtype=torch.float64, device=true.device)
    errors[partners] = (found.targets.to(true).reshape(len(found.targets), -1)[partners] - true[matched]).norm(dim=1)
    return found.certified.to(true.device) & ~(errors <= found.error_bars.to(true) + ROUNDINGS * unit * true.norm(dim=1).max())


def _table(target: Tensor) -> dict[str, str]:
    return {f"output {i + 1}": significant(value) for i, value in enumerate(target.flatten()[:MOST_OUTPUTS].tolist())}
