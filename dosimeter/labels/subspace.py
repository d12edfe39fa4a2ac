"""The subspace method's certified samples, counted per class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import labels_of, rounding_slack
from dosimeter.engines.premises import premises_of
from dosimeter.engines.subspace.distortion import unmodelled
from dosimeter.engines.subspace.problem import counter_of, separate_head
from dosimeter.engines.subspace.verdict import Separation
from dosimeter.interfaces import Defense, Exposure, LabelRecovery, Public
from dosimeter.network.head import Head, find_head
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
        proof = _prove_counts(found, head, exposure.public)
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
            premises=premises_of(exposure.public) if proved else (),
            confidence=proved / (proof.size or max(int(counts.sum()), 1)),
            outcome=Outcome.COMPLETED if proof.whole else Outcome.PARTIAL if proved else Outcome.AMBIGUOUS,
            message=message,
            details={"proved": proof.least},
        )

    def counter(self, defense: Defense) -> str:
        return counter_of(self.name, defense) or super().counter(defense)


@dataclass(frozen=True, kw_only=True)
class _Proof:
    """What is proved of the counts."""

    least: Tensor  # (C,) int64, samples proved to be in each class
    size: int | None  # of the batch: declared, or read off the gradient's scale
    whole: bool  # the proved samples are the whole batch
    message: str  # what is not proved, "" where nothing is left


def _prove_counts(found: Separation, head: Head, public: Public) -> _Proof:
    """The counts of the certified samples and, where these explain the whole weight gradient, of the samples that only the bias shows."""
    sure, times = found.certified, found.times
    least = torch.zeros(head.classes, dtype=torch.long, device=times.device).index_add(0, found.labels[sure], times[sure])
    placed, certified = int(least.sum()), int(sure.sum())
    size = public.batch_size if public.batch_size is not None else found.batch_size
    if size is not None and placed > size:
        message = f"{placed} samples explain the gradient, and the declared batch size is {size}: one of the two is wrong"
        return _Proof(least=torch.zeros_like(least), size=size, whole=False, message=message)
    if not found.complete:
        message = f"{certified} of {found.rank} dimensions of the gradient are certified; the other labels are guesses"
        return _Proof(least=least, size=size, whole=False, message=message)
    if size is None:
        message = "the gradient's scale is unknown and no batch size is declared: samples without a trace in the gradient may be missing"
        return _Proof(least=least, size=None, whole=False, message=message)
    if placed < size:
        least = least + _signs_of_the_rest(found, head, public, size - placed)
    left = size - int(least.sum())
    message = f"{left} of {size} samples leave no trace in the head's gradient, and their labels are guesses" if left else ""
    return _Proof(least=least, size=size, whole=left == 0, message=message)


def _signs_of_the_rest(found: Separation, head: Head, public: Public, missing: int) -> Tensor:
    """Lower bounds on the counts of `missing` samples that leave a trace in the bias's gradient only: (C,).

    With the found samples subtracted, −B τ ∇b_k = n_k − Σ_j p_jk over the missing samples. Probabilities are positive, so n_k is at
    least the left side, rounded up. No bound is given where the bias's gradient may be changed, or where labels are soft.
    """
    nothing = torch.zeros(head.classes, dtype=torch.long, device=found.labels.device)
    loss = public.loss
    assert isinstance(loss, CrossEntropy)
    changed = any(defense.distorts() or defense.scaling() != "none" for defense in public.defenses)
    if head.bias_gradient is None or changed or loss.smoothing > 0 or found.soft is not None or found.batch_size is None:
        return nothing
    features, labels, times = found.features, found.labels, found.times.double()
    errors = torch.softmax(head.logits(features) / loss.temperature, 1) - one_hot(labels, head.classes)  # (n, C)
    rest = found.batch_size * loss.temperature * head.bias_gradient.double() - times @ errors  # (C,)
    longest = float(torch.linalg.vector_norm(head.weight.double(), dim=1).max()) / loss.temperature
    moved = 0.5 * longest * times * found.error_bar * torch.linalg.vector_norm(features, dim=1)  # no probability moves by more
    slack = rounding_slack(head.bias_gradient, found.batch_size) + float(moved.sum())
    least = (-rest - slack).ceil().clamp_min(0).long()
    return least if int(least.sum()) <= missing else nothing


def _complete_counts(found: Separation, proof: _Proof) -> Tensor:
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
