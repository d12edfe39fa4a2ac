"""The subspace method's certified samples, counted per class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import labels_of
from dosimeter.engines.premises import premises_of
from dosimeter.engines.subspace.count_proof import CountProof, prove_counts
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
    The counts are certified if every dimension of the gradient is a certified sample and the proved samples add up to the batch size. A
    sample without a trace in the weight's gradient, as a black image, is proved by the signs of the bias's gradient or not at all.
    `details`: proved (C,), a proved lower bound of each count. Guesses fill the counts up, in the order of their residuals. Labels that
    mixup or undeclared smoothing made soft come back as such; the counts are then those of their largest entries.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS})
    trust = 60
    trust_when_distorted = 5

    attempts: NonNegativeInt = 4  # rounds of random starts without a new sample before the search ends
    starts: PositiveInt = 8  # random starts a class in such a round

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head = find_head(exposure)
        assert head.weight_gradient is not None
        found = separate_head(exposure, head, None, rng, method=self.name, attempts=self.attempts, starts=self.starts)
        proof = prove_counts(found, head, exposure.public)
        proved = int(proof.least.sum())
        counts = _complete_counts(found, proof)
        scores = torch.zeros(head.classes, dtype=torch.float64, device=counts.device)
        scores.scatter_reduce_(0, found.labels, 1 + found.certified.double() - found.residual.clamp(0, 1), "amax")
        message = proof.message
        if changing := unmodelled(head.weight_gradient, exposure.public):
            message += f": {changing} changes the gradient's entries in a way that is not modelled"
        return LabelEstimate(
            counts=counts,
            labels=labels_of(counts),
            soft=_soft_labels(found, exposure) if proof.whole else None,
            scores=torch.maximum(scores, 2.0 * (proof.least > 0)),
            certified=proof.whole,
            premises=(*premises_of(exposure.public), *proof.premises) if proved else (),
            confidence=proved / (proof.size or max(int(counts.sum()), 1)),
            outcome=Outcome.COMPLETED if proof.whole else Outcome.PARTIAL if proved else Outcome.AMBIGUOUS,
            message=message,
            details={"proved": proof.least},
        )

    def counter(self, defense: Defense) -> str:
        return counter_of(self.name, defense) or super().counter(defense)


def _complete_counts(found: Separation, proof: CountProof) -> Tensor:
    """The proved counts, and the best guesses up to the batch size; without one, every sample found: (C,)."""
    guesses = ~found.certified
    order = torch.argsort(found.residual[guesses])
    guessed = found.labels[guesses][order]
    counts = proof.least
    if proof.size is None:
        return counts + torch.bincount(guessed, minlength=len(counts))
    missing = proof.size - int(counts.sum())
    if len(guessed) == 0:
        guessed = counts.nonzero()[-1:, 0] if bool(counts.any()) else counts.argmax()[None]
    guessed = guessed[torch.arange(missing, device=guessed.device).clamp_max(len(guessed) - 1)]
    return counts + torch.bincount(guessed, minlength=len(counts))


def _soft_labels(found: Separation, exposure: Exposure) -> Tensor | None:
    """The targets in the order of their largest classes, where the loss does not soften them itself: (B, C)."""
    loss = exposure.public.loss
    if found.soft is None or not isinstance(loss, CrossEntropy) or loss.smoothing > 0:
        return None
    order = torch.argsort(found.labels, stable=True)
    return torch.repeat_interleave(found.soft[order], found.times[order], 0)
