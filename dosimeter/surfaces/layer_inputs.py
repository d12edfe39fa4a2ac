"""What a layer of the model receives, recovered and true: one score and one verdict for features and maps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Exposure
from dosimeter.network.model_state import copy_of
from dosimeter.network.probing import as_taken, input_of
from dosimeter.network.received import received_by
from dosimeter.randomness import generator
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.scores import (
    Comparison,
    Scores,
    Values,
    columns_of,
    mark_classmates,
    median,
    no_foreign_null,
    number,
    score_samples,
)
from dosimeter.surfaces.stand_ins import STAND_INS, stand_ins_for
from dosimeter.surfaces.verdicts import Verdict

SHARE_OF_NULL = 0.5  # an error below this share of each null's, and of the zero vector's, counts as leaked
LARGEST_CERTIFIED_ERROR = 1e-2  # a certificate is false beyond this error, or beyond its own error bar where that is smaller


def beats_nulls(error: float | None, rivals: Values) -> bool:
    """Whether a relative error is below half of each rival's, and below half of 1, the error of the zero vector."""
    known = [number(rival, math.inf) for rival in rivals]
    return number(error, math.inf) < SHARE_OF_NULL * min([1.0, *known])


def may_leak(kind: str, scores: Scores, certified: int) -> bool:
    """Whether anything is certified, or the median error beats the median of every null that was scored."""
    metrics, nulls = scores.as_lists()
    errors = [number(value, math.inf) for value in metrics.get(f"{kind}_error", ())]
    null_medians = [median([number(value, math.inf) for value in column]) for column in columns_of(nulls, f"{kind}_error")]
    return certified > 0 or not errors or beats_nulls(median(errors), null_medians)


def judge_errors(kind: str, counted: str, scores: Scores, *, certified: int, attempts: int = 1) -> tuple[Verdict, str]:
    """A leak is shown where one sample is certified, or where the median error beats the median of every null and luck is refuted.

    `kind` ("feature", "map") names the error, `counted` what is certified. `attempts` is the number of methods tried. Without the
    null of a foreign gradient nothing counts as leaked that is not certified.
    """
    metrics, nulls = scores.as_lists()
    details, metric = scores.details, f"{kind}_error"
    errors = [number(value, math.inf) for value in metrics.get(metric, ())]
    if refuted := details.get("false_certificates", 0):
        return Verdict.NOT_SHOWN, f"{refuted} of {certified} certificates are refuted by the truth: do not trust this run, and report it"
    if not errors:
        unmeasured = f"their error cannot be measured, since the client's own {kind}s cannot be computed again"
        verdict = Verdict.LEAKED if certified else Verdict.NOT_SHOWN
        return verdict, f"{certified} {counted} certified from the gradient alone; {unmeasured}"
    middle = median(errors)
    if certified:
        said = f"{certified} of {len(errors)} {counted} certified from the gradient alone"
        return Verdict.LEAKED, f"{said}; {_middle_words('', errors)}"
    null_medians = [median([number(value, math.inf) for value in column]) for column in columns_of(nulls, metric)]
    floor = min(null_medians, default=1.0)
    if not beats_nulls(middle, null_medians):
        return Verdict.NOT_SHOWN, f"{_middle_words(f'{kind} ', errors)} against {floor:.2g} of the best null"
    figures = f"median relative {kind} error {middle:.2g}, the best null has {floor:.2g}"
    if "foreign" not in nulls:
        return Verdict.NOT_SHOWN, f"{figures}; {no_foreign_null(details.get('refused_nulls'))}"
    chance = details.get("chance", 1.0)
    luck = luck_words(chance, attempts)
    if correct_for_attempts(chance, attempts) <= LARGEST_CHANCE:
        return Verdict.LEAKED, f"{figures}; {luck}"
    return Verdict.NOT_SHOWN, f"{figures}; {luck}, so this batch does not tell a leak from luck"


def _middle_words(kind: str, errors: list[float]) -> str:
    """The median error; where most samples were not recovered it has no number."""
    middle, came = median(errors), sum(map(math.isfinite, errors))
    if not math.isfinite(middle):
        return f"{came} of {len(errors)} samples came back, so that the median relative {kind}error is unknown"
    return f"median relative {kind}error {middle:.2g}"


@dataclass(frozen=True)
class LayerReader:
    """Tells what a layer of the exposure's model receives when the model sees a batch."""

    model: nn.Module
    layer: str
    arrange: Callable[[Tensor, str], Tensor]  # what the layer received (B, ...), and its name, as the surface holds it

    def __call__(self, inputs: Any) -> Tensor:
        """The whole batch at once, as batch norm in train mode saw it."""
        return self.arrange(input_of(self.model, self.layer, as_taken(self.model, inputs)), self.layer)

    def in_pieces(self, inputs: Any) -> Tensor:
        """Many public samples, as many at once as fit."""
        received = received_by(self.model, self.layer, as_taken(self.model, inputs))
        return self.arrange(received, self.layer).to(torch.float64)


def reader_of(exposure: Exposure, layer: str, arrange: Callable[[Tensor, str], Tensor] = lambda received, _: received) -> LayerReader:
    return LayerReader(copy_of(exposure.model), layer, arrange)  # a model may keep what it sees, and the exposure is the server's


def score_layer(surface: str, recovered: Tensor, true: Tensor, foreign: Tensor | None, read: LayerReader, comparison: Comparison) -> Scores:
    """Compare what was recovered (n, *shape) with the true inputs of a layer (B, *shape); `read` makes the nulls from samples."""
    exposure, auxiliary, truth = comparison.exposure, comparison.auxiliary, comparison.truth
    assert exposure is not None
    public, stand_ins = None, None
    if auxiliary is None:
        scale = comparison.normalization or exposure.public.normalization
        stand_ins = read.in_pieces(stand_ins_for(exposure.model, truth.inputs, STAND_INS, scale, generator(0, "stand-ins")))
    else:
        public = read.in_pieces(auxiliary.inputs)
    scores = score_samples(
        surface,
        recovered=recovered.detach().to(true.device, torch.float64),
        truth=true.to(torch.float64),
        auxiliary=public,
        foreign=None if foreign is None else foreign.detach().to(true.device, torch.float64),
        blind=("zero", torch.zeros_like(true, dtype=torch.float64)),
        stand_ins=stand_ins,
        classmates=mark_classmates(truth, auxiliary),
        metrics=comparison.metrics,
    )
    if drops_units(exposure.model):
        warning = f"the model drops units at random in train mode, so that the client's own {surface} cannot be computed again"
        blank = dict.fromkeys(scores.per_metric, warning)
        scores = replace(scores, per_metric={}, nulls={}, unavailable=scores.unavailable | blank, warnings=(*scores.warnings, warning))
    return scores


def can_refute(exposure: Exposure) -> bool:
    """Whether the true inputs of a layer are what the client trained on, so that they can refute a certificate."""
    return not drops_units(exposure.model) and not any(defense.replaces for defense in exposure.public.defenses)


def drops_units(model: nn.Module) -> bool:
    """Whether a forward pass of the model drops units at random."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(module.training and module.p > 0 for module in dropouts)
