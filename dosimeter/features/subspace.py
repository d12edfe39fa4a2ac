"""The subspace method: every sample's feature and label, exactly and with a certificate, from the head's gradient alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.premises import COPIES, premises_of
from dosimeter.engines.subspace.guesses import add_likely_guesses
from dosimeter.engines.subspace.problem import Targets, counter_of, separate_head
from dosimeter.engines.subspace.verdict import Separation
from dosimeter.interfaces import Defense, Exposure, FeatureRecovery, Public
from dosimeter.network.head import Head, find_head
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.registry import FEATURES
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Outcome


@FEATURES.register("subspace")
@dataclass(frozen=True, kw_only=True)
class Subspace(FeatureRecovery):
    """Takes the head's gradient apart into its samples exactly, with labels known or unknown, and certifies each.

    Ours; in no paper. ∇W = (1/B) Σ dᵢ fᵢᵀ has rank B if B ≤ min(C − 1, H). Its row space holds every feature, its column space every
    error. Each sample has C − 1 − B equations of its own (engines/subspace/equations.py). Beyond B = (C − 1)/2, joint.py fits the batch
    at once. No labels, batch size, bias or scale are needed.
    `targets`: "declared", "smoothed", "mixed" in pairs, or "any". Labels may be partial (-1: unknown) or soft.
    A certified sample has an error bar (eight deviations) of at most 1e-2, is isolated, fits worse under any other label, has a whole
    multiplicity, and is non-negative where features are. Nothing is certified where the update refutes what is declared.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS})
    partial_labels = True

    targets: Targets = "any"
    attempts: NonNegativeInt = 4  # rounds of random starts without a new sample before the search ends
    starts: PositiveInt = 8  # random starts a class in such a round

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head = find_head(exposure)
        assert head.weight_gradient is not None
        proved = separate_head(
            exposure, head, labels, rng, method=self.name, attempts=self.attempts, starts=self.starts, targets=self.targets
        )
        found, likely = add_likely_guesses(proved, exposure, head, labels)
        outcome, message = _verdict(found, proved.rank, head)
        message = message if likely is None else f"{message}; {likely.sentence}"
        if labels is not None and (unknown := int((labels.labels < 0).sum())):
            message += f"; {unknown} of {len(labels.labels)} labels were given as unknown, −1"
        each = torch.repeat_interleave(torch.arange(len(found.labels), device=found.labels.device), found.times)
        dtype = torch.promote_types(head.weight_gradient.dtype, torch.float32)
        return FeatureEstimate(
            features=found.features[each].to(dtype),
            labels=found.labels[each],
            residual=found.residual[each].to(dtype),
            certified=found.certified[each],
            error_bar=found.error_bar[each].to(dtype),
            soft=None if found.soft is None else found.soft[each].to(dtype),
            batch_size=int(found.times.sum()) if found.complete else found.rank or None,
            complete=found.complete,
            premises=_premises(found, exposure.public),
            outcome=outcome,
            message=message,
        )

    def counter(self, defense: Defense) -> str:
        if defense.distorts() and defense.is_modelled():
            return f"what {self.name} cannot prove it guesses, as the most likely features under what this defense is known to do"
        return counter_of(self.name, defense) or super().counter(defense)


def _premises(found: Separation, public: Public) -> tuple[str, ...]:
    """What the certificates take for granted. A sample that occurs once is proved to be one; of copies, only the mean is."""
    if not bool(found.certified.any()):
        return ()
    several = bool((found.times[found.certified] > 1).any()) or public.batch_size is None
    return (*premises_of(public), *((COPIES,) if several else ()))


def _verdict(found: Separation, dimensions: int, head: Head) -> tuple[Outcome, str]:
    certified, rank = int(found.certified.sum()), found.rank
    if found.doubt:
        return Outcome.PARTIAL, f"guesses only: {found.doubt}"
    if rank == 0:
        return Outcome.SINGULAR, "no direction of the head's gradient stands above its noise"
    if found.complete:
        return Outcome.COMPLETED, f"every dimension of the gradient, {certified} in all, is accounted for"
    if dimensions >= min(head.classes - 1, head.features):
        full = f"the gradient has full rank, {dimensions} = min(classes − 1, features)"
        return Outcome.SINGULAR, f"{full}: any batch of at least {dimensions} samples looks like this"
    if certified:
        return Outcome.PARTIAL, f"{certified} of {rank} samples are certified; the others are guesses"
    return Outcome.AMBIGUOUS, f"none of {rank} samples could be certified: the noise or the conditioning leaves them open"
