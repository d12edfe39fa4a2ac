"""One sample without a bias: its feature is known up to a scalar, which the label's form determines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.premises import premises_of
from dosimeter.engines.scalar.problem import Family
from dosimeter.engines.scalar.search import solve
from dosimeter.engines.scalar.verdict import verdict
from dosimeter.interfaces import Exposure, FeatureRecovery
from dosimeter.network.head import find_head
from dosimeter.registry import FEATURES
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Refused


@FEATURES.register("scalar")
@dataclass(frozen=True, kw_only=True)
class Scalar(FeatureRecovery):
    """Recovers the feature and the soft label of a single sample by a search over one scalar, without any bias.

    "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (2)-(5). One sample's gradient is (p −
    y) fᵀ, so f is one of its rows times a scalar, and the label is a function of that scalar. The label's `family` (smoothing, mixup or
    one_hot) determines the scalar.
    Departures, as in the label recovery soft_scalar: a shared bias gradient gives the scalar (`use_bias`), else a grid search does. A
    feature is certified if the noise changes it by less than 1e-3 of its length, under soft_scalar's conditions, and if rounding explains
    that noise. Given labels are not used.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE, Knowledge.SOFTMAX_LOSS})

    family: Family = "smoothing"
    use_bias: bool = True

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head, loss = find_head(exposure), exposure.public.loss
        assert head.weight_gradient is not None
        if not isinstance(loss, CrossEntropy):
            raise Refused(f"scalar solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.said()}")
        if head.classes < 4:
            raise Refused(f"scalar needs at least 4 classes to compare, got {head.classes}")
        if not bool(head.weight_gradient.any()):
            raise Refused("scalar needs a gradient that is not zero: here the model predicts the label exactly")
        problem, found = solve(head, loss.temperature, self.family, self.use_bias)
        judged = verdict(found, problem, exposure.public)
        options: dict[str, Any] = {
            "dtype": torch.promote_types(head.weight_gradient.dtype, torch.float32),
            "device": head.weight_gradient.device,
        }
        label = torch.as_tensor(found.labels[:1], **options)
        return FeatureEstimate(
            features=torch.as_tensor(problem.row / found.errors[0], **options)[None],
            labels=torch.as_tensor(found.labels[:1].argmax(1), device=label.device),
            residual=torch.as_tensor(found.residuals[:1], **options),
            certified=torch.tensor([judged.feature_certified], device=label.device),
            error_bar=torch.as_tensor(found.spreads[:1], **options),
            soft=label,
            batch_size=1,
            premises=premises_of(exposure.public) if judged.feature_certified else (),
            outcome=judged.outcome,
            message=judged.message,
        )
