"""The subspace method's certified samples, counted per class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.subspace.distortion import unmodelled
from dosimeter.engines.subspace.problem import counter_of, separate_head
from dosimeter.engines.subspace.verdict import Separation
from dosimeter.interfaces import Defense, Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Outcome


@LABELS.register("subspace")
@dataclass(frozen=True, kw_only=True)
class Subspace(LabelRecovery):
    """Counts the certified samples of each class, which the head's gradient is taken apart into.

    Ours; in no paper. See the feature recovery of the same name: labels come free, since every class is tried and only a
    sample's own fits. Works on trained models too, without auxiliary data, batch size or bias.
    The counts are certified where as many samples are certified as the gradient has dimensions. Otherwise guesses fill the
    counts up to the batch size, in the order of their residuals, and the outcome says so. Labels that mixup or undeclared smoothing
    made soft come back as such; the counts are then those of their largest entries.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS})
    trust = 60
    trust_when_distorted = 5

    attempts: NonNegativeInt = 4  # rounds of random starts without a new sample before the search ends
    starts: PositiveInt = 8  # random starts a class in such a round

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head = find_head(exposure)
        found = separate_head(exposure, head, None, rng, method=self.name, attempts=self.attempts, starts=self.starts)
        classes = head.classes
        order = torch.argsort(found.residual + 1e6 * ~found.certified)  # certified ones first, then the best guesses
        labels = torch.repeat_interleave(found.labels[order], found.times[order])
        size = exposure.public.batch_size
        if size is not None and len(labels) != size:
            labels = _fit_to_size(labels, size)
        counts = torch.bincount(labels, minlength=classes)
        certified = int(found.certified.sum())
        scores = torch.zeros(classes, dtype=torch.float64, device=labels.device)
        scores.scatter_reduce_(0, found.labels, 1 + found.certified.double() - found.residual.clamp(0, 1), "amax")
        outcome, message = Outcome.COMPLETED, ""
        if not found.complete:
            outcome = Outcome.PARTIAL if certified else Outcome.AMBIGUOUS
            message = f"{certified} of {found.rank} dimensions of the gradient are certified; the other labels are guesses"
        assert head.weight_gradient is not None
        if changing := unmodelled(head.weight_gradient, exposure.public):
            message += f": {changing} changes the gradient's entries in a way that is not modelled"
        return LabelEstimate(
            counts=counts,
            labels=torch.repeat_interleave(torch.arange(classes, device=counts.device), counts),
            soft=_soft_labels(found, exposure),
            scores=scores,
            certified=found.complete,
            confidence=certified / found.rank if found.rank else 0.0,
            outcome=outcome,
            message=message,
        )

    def counter(self, defense: Defense) -> str:
        return counter_of(self.name, defense) or super().counter(defense)


def _soft_labels(found: Separation, exposure: Exposure) -> Tensor | None:
    """The targets in the order of their largest classes, where the batch is complete and the loss does not soften them itself: (B, C)."""
    loss = exposure.public.loss
    if found.soft is None or not found.complete or not isinstance(loss, CrossEntropy) or loss.smoothing > 0:
        return None
    order = torch.argsort(found.labels, stable=True)
    return torch.repeat_interleave(found.soft[order], found.times[order], 0)


def _fit_to_size(labels: Tensor, size: int) -> Tensor:
    """The first `size` labels, or all of them and the last ones again until there are as many: (size,)."""
    if len(labels) == 0:
        return labels.new_zeros(size)
    return labels[torch.arange(size, device=labels.device).clamp_max(len(labels) - 1)]
