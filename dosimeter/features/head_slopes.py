"""Features under any loss: the head's gradient as a product of slopes and features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.head_slopes.samples import HeadSamples, separate
from dosimeter.engines.premises import COPIES, premises_of
from dosimeter.interfaces import Exposure, FeatureRecovery, Public
from dosimeter.network.head import find_head
from dosimeter.options import NonNegativeInt
from dosimeter.registry import FEATURES
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Outcome


@FEATURES.register("head_slopes")
@dataclass(frozen=True, kw_only=True)
class HeadSlopes(FeatureRecovery):
    """Takes the head's gradient apart without knowing the loss, by the zeros of its features; with several labels, by their vectors.

    Ours; in no paper. ∇W = Σ dᵢ fᵢᵀ and ∇b = Σ dᵢ hold under every loss. A batch of one has f = ∇W / ∇b. Features behind a ReLU are the
    edges of a cone (engines/head_slopes/factors.py): regressions, class weights and functions of the client's own included. Under binary
    cross-entropy the label vectors replace the zeros (engines/head_slopes/label_vectors.py). The label of a sample is −1 where the
    slopes do not name one.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT})
    reads_closings = True

    seed: NonNegativeInt = 0  # of the linear programs

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head = find_head(exposure, closings=True)
        assert head.weight_gradient is not None
        found = separate(exposure, head, rng, self.seed)
        each = torch.repeat_interleave(torch.arange(len(found.labels), device=found.labels.device), found.times)
        dtype = torch.promote_types(head.weight_gradient.dtype, torch.float32)
        return FeatureEstimate(
            features=found.features[each].to(dtype),
            labels=found.labels[each],
            residual=torch.zeros_like(found.error_bar[each]).to(dtype),
            certified=found.certified[each],
            error_bar=found.error_bar[each].to(dtype),
            soft=None if found.vectors is None else found.vectors[each].to(dtype),
            batch_size=found.size,
            complete=found.complete,
            premises=_premises(found, exposure.public),
            outcome=Outcome.COMPLETED if found.complete else Outcome.PARTIAL,
            message=found.message,
        )


def _premises(found: HeadSamples, public: Public) -> tuple[str, ...]:
    if not bool(found.certified.any()):
        return ()
    several = bool((found.times > 1).any()) or public.batch_size is None
    return (*premises_of(public), *((COPIES,) if several else ()))
