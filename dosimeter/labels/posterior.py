"""Counts from the posterior probabilities of auxiliary samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.client.losses import Focal
from dosimeter.engines.counting.auxiliary import Reference, class_gradients, reference_at
from dosimeter.engines.counting.counts import nothing_to_read
from dosimeter.engines.counting.shares import counts_of
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import Head, find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate


@LABELS.register("posterior")
@dataclass(frozen=True, kw_only=True)
class Posterior(LabelRecovery):
    """Counts each class by weighing auxiliary samples of the class against the others in the head's bias gradient.

    Zhang's thesis, Chapter 3, Theorem 2, Eq. (3.19), for every loss of Table 3.1. Written with the gradients at the
    logits, ĝ⁺ = φ̂(p̂⁺ − y⁺) of a class's own auxiliary samples and ĝ⁻ of the others': λ_j = B (ĝ_j⁻ − ∇b_j) / (ĝ_j⁻ − ĝ_j⁺).
    Departures: for focal loss each negative is weighed with its own class's Φ, which is exact, where the thesis takes
    class j's for all (`as_published=True` restores that); counts are completed to the batch size by the nearest whole
    numbers; classes without auxiliary samples take the mean sample; a single logit counts its two answers.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT, Knowledge.AUXILIARY})
    trust = 40
    needs_small_entries = True

    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, public = find_head(exposure), exposure.public
        assert head.bias_gradient is not None
        if not bool(head.bias_gradient.any()):
            return nothing_to_read(head.bias_gradient, public.batch_size, "the head's bias gradient")
        reference = reference_at(exposure, head.name, "auxiliary", rng)
        gradient = head.bias_gradient.double()
        if head.classes == 1:
            own, others = _answers(exposure, head, reference)
        elif self.as_published and isinstance(public.loss, Focal):
            own, others = _focal_as_published(public.loss, head, reference)
        else:
            own, others = class_gradients(public.loss, head, reference)
        shares = (others - gradient) / (others - own)  # Eq. (3.19) / B: (C,)
        if head.classes == 1:
            shares = torch.cat([1 - shares, shares])  # no and yes
        return counts_of(shares, head.weight_gradient, public, self.name)


def _answers(exposure: Exposure, head: Head, reference: Reference) -> tuple[Tensor, Tensor]:
    """The mean gradient of a single logit over the auxiliary samples answered yes, and over those answered no: (1,), (1,)."""
    assert reference.labels is not None
    gradients = exposure.public.loss.logit_gradient(head.logits(reference.features.double()), reference.labels)  # (n, 1)
    return gradients[reference.labels == 1].mean(0), gradients[reference.labels == 0].mean(0)


def _focal_as_published(loss: Focal, head: Head, reference: Reference) -> tuple[Tensor, Tensor]:
    """φ̂_j(p̂_j⁺ − 1) and φ̂_j p̂_j⁻ with φ̂_j = Φ(p̂_j⁺)/τ throughout (Theorem 2)."""
    assert reference.labels is not None
    plain = Focal(gamma=0.0, alpha=1.0, temperature=loss.temperature)  # (p − y)/τ
    own, others = class_gradients(plain, head, reference)
    own, others = loss.temperature * own, loss.temperature * others  # p̂⁺ − 1, p̂⁻
    positive = own + 1
    rest = (1 - positive).clamp_min(torch.finfo(positive.dtype).tiny)
    weight = loss.class_weights(own[None]) * rest**loss.gamma * (1 - loss.gamma * positive * positive.log() / rest) / loss.temperature
    return weight * own, weight * others
