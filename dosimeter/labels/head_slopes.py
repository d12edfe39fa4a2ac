"""Labels from the slopes at the outputs: several a sample under binary cross-entropy, one under a softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator
from torch.nn.functional import one_hot

from dosimeter.engines.counting.counts import labels_of
from dosimeter.engines.head_slopes.samples import separate
from dosimeter.engines.premises import premises_of
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.options import NonNegativeInt
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Refused


@LABELS.register("head_slopes")
@dataclass(frozen=True, kw_only=True)
class HeadSlopes(LabelRecovery):
    """Finds each sample's label vector exactly, with a certificate, where samples have several labels or classes have weights.

    Ours; in no paper. Binary cross-entropy: the head's gradient is Σ (σ(W f + b) − y) fᵀ, and each sample satisfies C equations in 2B
    unknowns and a label vector of zeros and ones (engines/head_slopes/label_vectors.py, Eq. 1): B < C/2. Where that does not hold, and
    for class weights or losses of the client's own over a softmax: features behind a ReLU and batches of one come apart without
    knowing the loss (engines/head_slopes/factors.py), and their slopes name the labels. Under plain cross-entropy too: where a batch has
    nearly as many samples as classes, `subspace` may separate none of them.
    `soft` holds the label vectors, `counts` how many samples have each label. `details`: proved (C,).
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT})
    trust = 55
    reads_closings = True

    seed: NonNegativeInt = 0  # of the linear programs

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head = find_head(exposure, closings=True)
        found = separate(exposure, head, rng, self.seed)
        classes = max(head.classes, 2)
        several = found.vectors is not None and head.classes > 1
        known = found.labels >= 0
        rows = found.vectors if several else one_hot(found.labels.clamp_min(0), classes) * known[:, None]
        assert rows is not None
        each = torch.repeat_interleave(rows.long(), found.times, 0)  # (n, C)
        sure = torch.repeat_interleave(found.certified & known, found.times)
        if not bool(known.any()):
            raise Refused(found.message or "the slopes name no label")
        counts, proved = each.sum(0), (each * sure[:, None]).sum(0)
        whole = found.complete and bool(sure.all()) and exposure.public.batch_size is not None  # else samples may occur more often
        return LabelEstimate(
            counts=counts,
            labels=labels_of(counts),
            soft=each.to(head.weight) if several else None,
            certified=whole,
            premises=premises_of(exposure.public) if bool(sure.any()) else (),
            confidence=float(sure.double().sum() / (found.size or len(sure))),
            outcome=Outcome.COMPLETED if whole else Outcome.PARTIAL,
            message=found.message,
            details={"proved": proved},
        )
