"""GradInversion's label step: the smallest entry of each gradient row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator

from dosimeter.engines.counting.counts import nothing_to_read, present_classes
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate


@LABELS.register("gradinversion")
@dataclass(frozen=True, kw_only=True)
class GradInversion(LabelRecovery):
    """Takes a class for present where its row of the head's gradient has a negative entry.

    Yin et al., "See Through Gradients: Image Batch Recovery via GradInversion", CVPR 2021, Eq. (7): the classes with the
    smallest row minima, as many as there are samples, each once; that is `unique=True`. For batches with repeated
    labels the rule of Ma et al., ICLR 2023, Section 4.2: every row with a negative minimum. Both rest on non-negative
    features.
    Departure: the present classes share the batch size out in proportion to their minima; `as_published=True` stops at
    presence, each class once, however many.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS})

    unique: bool = False
    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        rows = find_head(exposure).weight_gradient
        assert rows is not None
        size = exposure.public.batch_size
        if not bool(rows.any()):
            return nothing_to_read(rows, size)
        scores = -rows.amin(1).double()  # (C,)
        present = scores > 0
        if self.unique and size is not None:
            smallest = scores.argsort(descending=True, stable=True)[:size]  # rows that no sample has often tie at zero
            present = present.new_zeros(len(present)).index_fill(0, smallest, True)
        rule = "has a row of the head's gradient with a negative entry"
        return present_classes(scores, present, scores, size, once=self.as_published or self.unique, rule=rule)
