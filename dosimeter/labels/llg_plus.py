"""LLG+: impact and offsets measured on auxiliary data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.counting.auxiliary import class_gradients, reference_at
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.labels.llg import fill_by_impact
from dosimeter.network.head import find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate


@LABELS.register("llg_plus")
@dataclass(frozen=True, kw_only=True)
class LLGPlus(LabelRecovery):
    """Counts classes as LLG does, with the impact of a sample and each row's offset measured on auxiliary data.

    Wainakh et al., PoPETs 2022: LLG+. Auxiliary batches of a single class j give the row sums g^(j); the impact is
    m = (1 + 1/C) · mean_j g_j^(j) / B and the offset of row i, s_i = mean over j ≠ i of g_i^(j), is taken off between
    the stages of Algorithm 1.
    Departure: the single-class gradients of the head are written down in closed form from features and logits
    instead of by one backward pass a class; classes without auxiliary samples take the mean sample.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS, Knowledge.BATCH_SIZE, Knowledge.AUXILIARY})

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        head, size = find_head(exposure), exposure.public.batch_size
        assert head.weight_gradient is not None
        assert size is not None
        reference = reference_at(exposure, head.name, "auxiliary", rng)
        own, offset = class_gradients(exposure.public.loss, head, reference, factor=reference.features.sum(1))
        impact = (1 + 1 / head.classes) * own.mean() / size
        return fill_by_impact(head.weight_gradient.sum(1, dtype=torch.float64), impact, size, offset)
