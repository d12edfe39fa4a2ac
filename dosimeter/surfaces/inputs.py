"""Inputs: the client's samples themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dosimeter.columns import Columns
from dosimeter.engines.identifiability import counting_sentences
from dosimeter.engines.misfit import misfit
from dosimeter.interfaces import ActiveAttack, Attack, Exposure, Recovery
from dosimeter.normalization import to_pixels
from dosimeter.numbers import THIN, significant
from dosimeter.randomness import generator
from dosimeter.registry import ATTACKS
from dosimeter.surfaces import rows
from dosimeter.surfaces.gallery import gallery_facts
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.pictures import show_inputs
from dosimeter.surfaces.scores import (
    SAMPLE_NULLS,
    Comparison,
    Nulls,
    Scores,
    Values,
    columns_of,
    in_truths_order,
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
from dosimeter.types import Batch, Evidence, Normalization, Reconstruction, Refused

MARGIN_DB = 3.0  # an input counts as leaked if it beats each of its nulls by this margin
LONE_ASSUMPTION = ", if samples of its kind differ from each other as drawn ones do: auxiliary samples would test it"
LARGEST_CLAIM_ERROR = 0.02  # relative error beyond which an input that an attack claims to have proved is no sample of the batch
DARKEST = 0.05  # root mean square of pixels below which an error is relative to this
UNDECLARED = (
    "the samples are rows of numbers, scored as signals: normalization=dm.Columns(...) scores the rows of a table column by column, in "
    "their own units"
)
PIXEL_SLACK = 1e-3  # rounding may move a true pixel this far outside [0, 1]


@SURFACES.register("inputs")
class Inputs(Surface[Reconstruction]):
    """The client's samples, rebuilt."""

    position = 40
    reads = ("numbers", "regressions", "grids")
    estimate = Reconstruction
    methods = ATTACKS
    key, plural = "attack", "attacks"
    grid_methods: ClassVar = {"inverting_gradients": {"steps": 200}}
    headless_methods = ("dlg",)
    headline = "psnr"
    visible = "ssim"  # a flat sample has a high PSNR, and nothing on it to see
    plot = "samples"

    description = "The client’s samples themselves, rebuilt from what it sent."
    if_leaked = (
        "The server can rebuild private samples from one update: closer to the truth than anything it could make without that update."
    )
    if_not_shown = (
        "What was tried here came no closer to the private samples than its nulls. That is no proof: a longer or newer attack may."
    )
    null_words: ClassVar = SAMPLE_NULLS | {
        "gray": ("gray", "one even gray, which needs no knowledge at all"),
        "middle": ("middle", "the middle of every column’s range, which needs no knowledge at all"),
        "foreign features": (
            "decoder, foreign features",
            "what the decoder draws from the features of samples that the server already had",
        ),
        "mean feature": ("decoder, mean feature", "what the decoder draws from the mean of the features that the server already had"),
        "shuffled features": ("decoder, shuffled features", "what the decoder draws from the recovered features in random order"),
    }
    share_words = f"the share that beats every null by {MARGIN_DB:g}{THIN}dB (rows of a table: by a tenth of the columns)"
    beaten_words = f"beats every null by {MARGIN_DB:g}{THIN}dB or more (rows of a table: by a tenth of the columns)"
    counting_words = (
        f"An input counts as leaked if it beats each of its nulls by {MARGIN_DB:g}{THIN}dB, "
        "and a row of a table with declared columns if a tenth more of its columns are right."
    )

    def headline_in(self, metrics: Mapping[str, Any]) -> str:
        return rows.METRIC if rows.METRIC in metrics else self.headline

    def label_source(self, method: Recovery, source: Any) -> Any:
        return "optimised" if isinstance(method, ActiveAttack) else source  # an active attack finds the labels itself

    def objective_at_truth(self, method: Attack, exposure: Exposure, found: Reconstruction, truth: Batch) -> float | None:
        if len(found.inputs) != len(truth.inputs):
            return None  # of some of the samples, as behind a filter, it says nothing
        return method.objective(exposure, found, truth.inputs, truth.targets)

    def score(self, found: Reconstruction, comparison: Comparison) -> Scores:
        scale = comparison.normalization or found.normalization
        if not isinstance(scale, Columns):
            return score_inputs(found, comparison)
        scores = rows.score_rows(found, comparison, scale)
        return with_false_claims(scores, found, comparison, to_pixels(found.inputs, scale), to_pixels(comparison.truth.inputs, scale))

    def judge(self, found: Reconstruction, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        if refuted := scores.details.get("false_certificates", 0):
            said = f"{refuted} of {len(found.inputs)} inputs that the attack claims to have proved are refuted by the truth"
            return Verdict.NOT_SHOWN, f"{said}: do not trust this run, and report it"
        chance, refused = scores.details.get("chance", 1.0), scores.details.get("refused_nulls", {})
        judge = rows.judge_rows if rows.METRIC in scores else judge_inputs
        return judge(*scores.as_lists(), chance=chance, attempts=attempts, refused=refused)

    def may_leak(self, found: Reconstruction, scores: Scores) -> bool:
        metrics, nulls = scores.as_lists()
        metric = self.headline_in(metrics)
        rivals = list(zip(*columns_of(nulls, metric)))
        return any(map(self.rule_of(metric), metrics[metric], rivals))

    def proved_samples(self, found: Reconstruction, scores: Scores) -> list[bool]:
        return in_truths_order(torch.full((len(found.inputs),), bool(found.premises)), scores.assignment)

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return beats_nulls(value, rivals)

    def rule_of(self, metric: str) -> Callable[[float | None, Values], bool]:
        return rows.beats_nulls if metric == rows.METRIC else beats_nulls

    def count_guesses(self, found: Reconstruction) -> int:
        return len(keep_finite(found.inputs))

    def merge(self, estimates: Sequence[Reconstruction], count: int) -> Reconstruction:
        sound = [estimate.inputs.flatten(1).isfinite().all(1) for estimate in estimates]
        inputs = torch.cat([estimate.inputs[finite] for estimate, finite in zip(estimates, sound)])[:count]
        labels = torch.cat([estimate.labels[finite] for estimate, finite in zip(estimates, sound)])[:count]
        return replace(estimates[0], inputs=inputs, labels=labels)

    def details(self, found: Reconstruction, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        counted = {"identifiability": said} if (said := counting_sentences(exposure)) else {}
        return {"objective": found.objective, "distance": found.distance, "restarts": list(found.restarts)} | counted

    def misfit(self, found: Reconstruction, exposure: Exposure) -> float | None:
        if not found.inputs.isfinite().all():
            return None
        try:
            return misfit(exposure, found.inputs, found.labels)
        except (Refused, KeyError):  # the server cannot repeat this training, or the update has a tensor that no gradient has
            return None

    def shortfalls(self, details: Mapping[str, Any]) -> list[str]:
        """An objective that is lower at the truth tells under-optimisation from impossibility."""
        reached, at_truth = details.get("objective"), details.get("objective_at_truth")
        if reached is None or at_truth is None or not reached > at_truth:
            return []
        ends = f"the attack ended at objective {reached:.3g}, the true batch has {at_truth:.3g}"
        return [f"under-optimised: {ends}; more steps or restarts may show more"]

    def evidence(self, found: Reconstruction, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        return show_inputs(found, comparison, scores)

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        told = gallery_facts(details.get("identification") or [])
        reached, truth = details.get("objective"), details.get("objective_at_truth")
        if not isinstance(reached, (int, float)) or not isinstance(truth, (int, float)):
            return told
        hint = ": the attack stopped short, so it was under-optimised" if truth < reached else ""
        return [*told, f"objective {significant(reached)}, at the truth {significant(truth)}{hint}"]


def beats_nulls(psnr: float | None, rivals: Values) -> bool:
    """Whether one input counts as leaked: its PSNR exceeds that of each null by the margin. Without a null it never does."""
    known = [number(rival) for rival in rivals if not math.isnan(number(rival))]
    value = number(psnr, -math.inf)
    return bool(known) and value > -math.inf and value >= max(known) + MARGIN_DB


def judge_inputs(
    found: Mapping[str, Values], nulls: Nulls, *, chance: float, attempts: int = 1, refused: Mapping[str, str] | None = None
) -> tuple[Verdict, str]:
    """Inputs leaked where at least one input beats each of its own nulls, and luck is refuted.

    `chance` is the probability of luck, `attempts` the number of attacks tried, `refused` why a null could not be made. Without the
    null of a foreign gradient nothing counts as leaked.
    """
    psnr = [number(value, -math.inf) for value in found["psnr"]]
    rivals = list(zip(*columns_of(nulls, "psnr")))
    best = [max(number(value, -math.inf) for value in column) for column in rivals]
    above = sum(map(beats_nulls, psnr, rivals))
    given = [(value, rival) for value, rival in zip(psnr, best) if value > -math.inf]  # an attack may give back some inputs only
    if not given:
        return Verdict.NOT_SHOWN, f"none of {len(psnr)} inputs came back"
    middle, rival = (median(column) for column in zip(*given))
    figures = f"median PSNR {middle:.1f} dB against {rival:.1f} dB of each input's best null"
    if len(given) < len(psnr):
        figures = f"{len(given)} came back, {figures}"
    if not above:
        return Verdict.NOT_SHOWN, f"no input beats its nulls by {MARGIN_DB:g} dB; {figures}"
    figures = f"{above} of {len(psnr)} inputs beat every null by {MARGIN_DB:g} dB or more; {figures}"
    if "foreign" not in nulls:
        return Verdict.NOT_SHOWN, f"{figures}; {no_foreign_null(refused)}"
    luck = luck_words(chance, attempts)
    if correct_for_attempts(chance, attempts) <= LARGEST_CHANCE:
        assumed = "" if len(psnr) > 1 or "nearest" in nulls else LONE_ASSUMPTION
        return Verdict.LEAKED, f"{figures}; {luck}{assumed}"
    return Verdict.NOT_SHOWN, f"{figures}; {luck}, so this batch does not tell a leak from luck"


def score_inputs(found: Reconstruction, comparison: Comparison) -> Scores:
    """Compare recovered pixels, and the nulls, with the true pixels."""
    truth, auxiliary, foreign = comparison.truth, comparison.auxiliary, comparison.foreign

    def pixels(inputs: Tensor, path: str, scale: Normalization) -> Tensor:
        if inputs.shape[1:] != truth.inputs.shape[1:]:
            raise ValueError(f"{path}: expected samples of shape {tuple(truth.inputs.shape[1:])}, got {tuple(inputs.shape[1:])}")
        if len(scale.mean) != len(scale.std) or len(scale.mean) not in (1, inputs.shape[1]):
            raise ValueError(f"normalization: expected 1 or {inputs.shape[1]} means and stds, got {scale}")
        precision = torch.promote_types(found.inputs.dtype, torch.float32)
        return to_pixels(inputs.detach().to(found.inputs.device, precision), scale)

    scale = comparison.normalization or found.normalization
    wanted = pixels(truth.inputs, "truth.inputs", scale)
    foreign_scale = comparison.normalization or (scale if foreign is None else foreign.normalization)
    scores = score_samples(
        "inputs",
        recovered=pixels(found.inputs, "found.inputs", scale),
        truth=wanted,
        auxiliary=None if auxiliary is None else pixels(auxiliary.inputs, "auxiliary.inputs", scale),
        foreign=None if foreign is None else pixels(foreign.inputs, "foreign.inputs", foreign_scale),
        own={name: pixels(inputs, f"found.nulls[{name!r}]", scale) for name, inputs in found.nulls.items()},
        blind=("gray", torch.full_like(wanted, 0.5)),
        stand_ins=draw_stand_ins(tuple(wanted.shape[1:]), STAND_INS, generator(0, "stand-ins")).to(wanted),
        classmates=mark_classmates(truth, auxiliary),
        metrics=comparison.metrics,
    )
    scores = with_false_claims(scores, found, comparison, pixels(found.inputs, "found.inputs", scale), wanted)
    if wanted.ndim == 2:
        scores = replace(scores, warnings=(*scores.warnings, UNDECLARED))
    if bool((wanted < -PIXEL_SLACK).any()) or bool((wanted > 1 + PIXEL_SLACK).any()):
        warning = f"true pixels reach from {wanted.min():.3g} to {wanted.max():.3g}, but psnr, ssim and lpips take them to lie in [0, 1]"
        scores = replace(scores, warnings=(*scores.warnings, f"{warning}: pass the normalization"))
    return scores


def with_false_claims(scores: Scores, found: Reconstruction, comparison: Comparison, claimed: Tensor, truth: Tensor) -> Scores:
    """The scores with the number of claims that the truth refutes, where the attack claims to have proved anything."""
    if not found.premises or _are_replaced(comparison):
        return scores
    return replace(scores, details=scores.details | {"false_certificates": count_false_claims(claimed, truth)})


def count_false_claims(claimed: Tensor, truth: Tensor) -> int:
    """How many claimed inputs (n, *shape) are no sample of the batch (B, *shape), in pixels; claims beyond the batch's size are false."""
    claimed, truth = claimed.flatten(1).double(), truth.flatten(1).to(claimed.device).double()
    distance, nearest = torch.cdist(claimed, truth).min(1)
    scale = truth.norm(dim=1).clamp_min(DARKEST * math.sqrt(truth.shape[1]))[nearest]
    wrong = int((~(distance <= LARGEST_CLAIM_ERROR * scale)).sum())
    return max(wrong, len(claimed) - len(truth))


def _are_replaced(comparison: Comparison) -> bool:
    """Whether the client trained on other samples than the private ones, which then refute nothing."""
    return comparison.exposure is not None and any(defense.replaces for defense in comparison.exposure.public.defenses)
