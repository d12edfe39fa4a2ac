"""LLG: every sample takes the same amount off its class's row sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.counting.counts import estimate_of, nearest_counts, nothing_to_read, whole_number_confidence
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate


@LABELS.register("llg")
@dataclass(frozen=True, kw_only=True)
class LLG(LabelRecovery):
    """Counts each class by how often one sample's average impact fits into its gradient row sum.

    Wainakh et al., "User-Level Label Leakage from Gradients in Federated Learning", PoPETs 2022, Algorithm 1: each
    negative row gets a sample, then the rest go one by one to the smallest row less its impact.
    Departures: the second stage is solved at once, and every class has probability 1/C. With mean feature sum σ a row sums to
    σ (1/C − n/B). If N negative rows hold all samples, they sum to σ (N/C − 1), which gives σ and the offset σ/C. The paper has
    (1 + 1/C) for 1 / (1 − N/C) and no offset (`as_published=True`). A present class's positive row makes σ too
    small (see llg_star).
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS, Knowledge.BATCH_SIZE})
    trust = 30

    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        rows = find_head(exposure).weight_gradient
        assert rows is not None
        size = exposure.public.batch_size
        assert size is not None
        sums = rows.sum(1, dtype=torch.float64)  # (C,)
        classes, negative = len(sums), sums.clamp_max(0).sum()
        if self.as_published:
            return fill_by_impact(sums, (1 + 1 / classes) * negative / size, size)
        feature_sum = -negative / (1 - int((sums < 0).sum()) / classes) if bool((sums >= 0).any()) else -negative
        return fill_by_impact(sums, -feature_sum / size, size, feature_sum / classes)


def fill_by_impact(sums: Tensor, impact: Tensor, size: int, offset: Tensor | float = 0.0) -> LabelEstimate:
    """Algorithm 1: row sums (C,), one sample's impact (negative) and the rows' offsets to counts.

    The first stage looks at the row sums as they are; the offsets are taken off before the second.
    """
    if not bool(sums.any()):
        return nothing_to_read(sums, size, "every row sum of the head's gradient")
    estimate = (sums - offset) / impact if float(impact) < 0 else torch.zeros_like(sums)  # (C,) in samples
    present = sums < 0
    if int(present.sum()) > size:  # the first stage already fills the batch: its most negative rows
        present = torch.zeros_like(present).index_fill(0, (-sums).topk(size).indices, True)
    counts = nearest_counts(estimate, size, at_least=present)
    return estimate_of(counts, scores=estimate, confidence=whole_number_confidence(estimate, counts))
