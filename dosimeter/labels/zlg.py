"""ZLG: counts from estimated posteriors and the mean feature sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.counting.auxiliary import Source, reference_at
from dosimeter.engines.counting.counts import nothing_to_read
from dosimeter.engines.counting.shares import class_shares, counts_of
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused


@LABELS.register("zlg")
@dataclass(frozen=True, kw_only=True)
class ZLG(LabelRecovery):
    """Counts each class from its gradient row sum, given estimates of the probabilities and of the mean feature sum.

    Geng et al., "Towards General Deep Leakage in Federated Learning", arXiv 2110.09074: n_c = Σ_k p_kc − K · rowsum_c / Ō,
    where p and Ō, the mean sum of a sample's features, come from auxiliary samples or from dummies.
    Departures: counts are completed to the batch size by the nearest whole numbers; temperature, smoothing, focal and
    binary cross-entropy are allowed for (with rowsum / Ō as the mean gradient at the logits).
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT})
    trust = 20
    needs_small_entries = True

    source: Source = "available"

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, public = find_head(exposure), exposure.public
        assert head.weight_gradient is not None
        if head.classes < 2:
            raise Refused("zlg needs at least two logits; this model has one, for which posterior works")
        if not bool(head.weight_gradient.any()):
            return nothing_to_read(head.weight_gradient, public.batch_size)
        features = reference_at(exposure, head.name, self.source, rng).features
        feature_sum = features.double().sum(1).mean()  # Ō
        logit_gradient = head.weight_gradient.sum(1, dtype=torch.float64) / feature_sum  # (C,)
        shares = class_shares(public.loss, head, features, logit_gradient, self.name)
        return counts_of(shares, head.weight_gradient, public, self.name)
