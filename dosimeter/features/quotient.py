"""One feature a class, as the quotient of the head's weight and bias gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from dosimeter.interfaces import Exposure, FeatureRecovery
from dosimeter.network.head import Head, find_head
from dosimeter.registry import FEATURES
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Outcome, Refused


@FEATURES.register("quotient")
@dataclass(frozen=True, kw_only=True)
class Quotient(FeatureRecovery):
    """Divides a class's weight gradient by its bias gradient, which is exact for one sample and close for distinct labels.

    `form="plain"`: f = ∇W_y / ∇b_y, Aono et al. 2017 and rgla Eq. (1).
    `form="fgla"`, the default: Xue et al., "Fast Generation-Based Gradient Leakage Attacks", INFOCOM 2023:
    f = (∇W_y − o_W)/(∇b_y − o_b), where o, the share of the other samples, is the mean over absent classes times (B − 1)/B.
    Without labels, a class counts as present if its bias gradient is negative. Batches with repeated labels are refused: samples of one
    label share one row, and their quotient is a mean and no sample.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT, Knowledge.SOFTMAX_LOSS})

    form: Literal["plain", "fgla"] = "fgla"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head = find_head(exposure)
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        weight, bias = head.weight_gradient.double(), head.bias_gradient.double()
        present = _present_classes(bias, labels, exposure.public.batch_size)
        if self.form == "fgla":
            weight, bias = _subtract_other_samples(weight, bias, present)
        features = weight[present] / bias[present, None]  # (B, H)
        dtype = torch.promote_types(head.weight_gradient.dtype, torch.float32)
        return FeatureEstimate(
            features=features.to(dtype),
            labels=present,
            residual=_unexplained_share(head, features, present).to(dtype).expand(len(present)),
            certified=torch.zeros(len(present), dtype=torch.bool, device=present.device),
            batch_size=len(present),
            outcome=Outcome.COMPLETED if bool(torch.isfinite(features).all()) else Outcome.SINGULAR,
        )


def quotient_features(weight_gradient: Tensor, bias_gradient: Tensor, labels: Tensor) -> Tensor:
    """FGLA's features for `labels`: (B, H). Samples of a repeated label all get the mean of their class."""
    weight, bias = _subtract_other_samples(weight_gradient, bias_gradient, labels.unique())
    return weight[labels] / bias[labels, None]


def _present_classes(bias: Tensor, labels: LabelEstimate | None, size: int | None) -> Tensor:
    """The classes of the batch, each once: (B,). Refused if a label occurs twice."""
    if labels is not None:
        repeated = (labels.counts > 1).nonzero()[:, 0]
        if len(repeated):
            raise Refused(
                f"quotient needs distinct labels; class {int(repeated[0])} occurs {int(labels.counts[repeated[0]])} times. "
                "subspace separates samples of one label"
            )
        return labels.labels
    present = (bias < 0).nonzero()[:, 0]
    if size is not None and len(present) < size:
        raise Refused(
            f"quotient needs distinct labels; {size} samples show only {len(present)} classes. subspace separates samples of one label"
        )
    if len(present) == 0:
        raise Refused("quotient finds no class with a negative bias gradient; pass labels=")
    return present


def _subtract_other_samples(weight: Tensor, bias: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """∇W − o_W and ∇b − o_b: (C, H) and (C,). Nothing is subtracted if every class is present."""
    if len(present) == 0:
        raise Refused("quotient needs at least one label; the estimate holds none")
    absent = torch.ones(len(bias), dtype=torch.bool, device=bias.device)
    absent[present] = False
    if not bool(absent.any()):
        return weight, bias
    others = (len(present) - 1) / len(present)
    return weight - others * weight[absent].mean(0), bias - others * bias[absent].mean()


def _unexplained_share(head: Head, features: Tensor, labels: Tensor) -> Tensor:
    """‖∇W − Dᵀ F‖ / ‖∇W‖ with D at the recovered features' own logits."""
    assert head.weight_gradient is not None
    error = torch.softmax(head.logits(features), 1)
    error[torch.arange(len(labels), device=labels.device), labels] -= 1
    target = head.weight_gradient.double()
    return torch.linalg.matrix_norm(target - error.T @ features / len(labels)) / torch.linalg.matrix_norm(target)
