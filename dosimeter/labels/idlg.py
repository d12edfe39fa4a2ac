"""iDLG: the label's gradient row points the other way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.counting.counts import nothing_to_read, present_classes
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate


@LABELS.register("idlg")
@dataclass(frozen=True, kw_only=True)
class IDLG(LabelRecovery):
    """Takes a class for present where its row of the head's gradient sums to less than zero.

    Zhao et al., "iDLG: Improved Deep Leakage from Gradients", arXiv 2001.02610, Section 3: of one sample, the label's row is the one
    that points against all others. For batches, Ma et al., ICLR 2023, Section 4.2: every row with a negative sum, which is sound only
    where features are non-negative.
    Departures: the present classes share the batch size in proportion to their row sums. The papers stop at presence, which
    `as_published=True` restores: each present class once. In a batch of one, each row is compared with the longest instead of all with
    all. For a rank-one gradient that is the same rule.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS})
    trust = 10

    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        rows = find_head(exposure).weight_gradient
        assert rows is not None
        size = exposure.public.batch_size
        if not bool(rows.any()):
            return nothing_to_read(rows, size)
        scores = against_the_others(rows) if size == 1 else -rows.sum(1, dtype=torch.float64)  # (C,)
        present = scores == scores.max() if size == 1 else scores > 0
        rule = "has a row of the head's gradient with a negative sum"
        return present_classes(scores, present, scores, size, once=self.as_published, rule=rule)


def against_the_others(rows: Tensor) -> Tensor:
    """How far each row points against the majority: of one sample, ∇W_i = (p_i − y_i) f, negative for the label alone."""
    rows = rows.double()
    along = rows @ rows[rows.norm(dim=1).argmax()]  # (C,) ∇W_i · f up to a factor
    signs = torch.sign(along).sum()
    if signs == 0:  # two classes of opposite sign: only the features' own sign can tell
        return -rows.sum(1)
    return -along * torch.sign(signs)
