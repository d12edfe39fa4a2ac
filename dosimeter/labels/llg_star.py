"""LLG*: impact and offsets measured on dummy data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import softmax

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.auxiliary import logits_in_chunks, reference_at
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.labels.llg import fill_by_impact
from dosimeter.network.head import Head, find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused


@LABELS.register("llg_star")
@dataclass(frozen=True, kw_only=True)
class LLGStar(LabelRecovery):
    """Counts classes as LLG does, with the impact of a sample and each row's offset measured on random inputs.

    Wainakh et al., PoPETs 2022: LLG*, as LLG+ with dummy data in place of auxiliary ones. Here every dummy, an image
    of uniform noise, serves every class j: with feature sums σ and probabilities p the row sums of a
    batch of class j are g_i^(j) = E[σ (p_i − δ_ij)].
    Departure: the expectation in closed form instead of one backward pass a class.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS, Knowledge.BATCH_SIZE})

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        head, size, loss = find_head(exposure), exposure.public.batch_size, exposure.public.loss
        assert head.weight_gradient is not None
        assert size is not None
        if not isinstance(loss, CrossEntropy):
            raise Refused(f"llg_star writes down the dummies' gradients for cross-entropy; llg_plus covers the client's {loss.name}")
        features = reference_at(exposure, head.name, "dummy", rng).features
        offset = _offsets(head, features, loss.temperature)
        own = offset - features.double().sum(1).mean() / loss.temperature
        impact = (1 + 1 / head.classes) * own.mean() / size
        return fill_by_impact(head.weight_gradient.sum(1, dtype=torch.float64), impact, size, offset)


def _offsets(head: Head, features: Tensor, temperature: float) -> Tensor:
    """s_i = E[σ p_i] / τ, the row sum of a class that is absent: (C,)."""
    total = torch.zeros(head.classes, dtype=torch.float64, device=features.device)
    for rows, logits in logits_in_chunks(head, features):
        total += features[rows].double().sum(1) @ softmax(logits / temperature, 1)
    return total / (len(features) * temperature)
