"""Membership by the likelihood of a noisy update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.membership.estimate import MembershipEstimate
from dosimeter.engines.membership.likelihood import likelihood_scores
from dosimeter.engines.membership.terms import candidate_terms, require_mean
from dosimeter.interfaces import Exposure, MembershipTest
from dosimeter.registry import MEMBERSHIP
from dosimeter.types import Batch, Knowledge, Refused


@MEMBERSHIP.register("likelihood")
@dataclass(frozen=True, kw_only=True)
class Likelihood(MembershipTest):
    """Scores each candidate behind declared noise: how much likelier the update is with it in the batch than without it.

    Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022 (LiRA): a likelihood ratio a sample.
    Departure: the noise is known, so that no shadow models are trained, and the other samples are left out. Nothing is proved.
    """

    needs = frozenset({Knowledge.CANDIDATES, Knowledge.BATCH_SIZE})

    def __call__(self, exposure: Exposure, candidates: Batch, rng: Generator) -> MembershipEstimate:
        size = exposure.public.batch_size or 1
        noise, multiplier = _declared_noise(exposure, size, self.name)
        require_mean(exposure, self.name)
        floors = {name: noise[name] for name in exposure.update if noise.get(name, 0.0) > 0}
        scores = torch.cat(
            [likelihood_scores(exposure.update, terms, floors, size) for _, terms in candidate_terms(exposure, self.name, set(floors))]
        )
        nobody = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        return MembershipEstimate(scores=scores, members=nobody, excluded=nobody, test=self.name, noise_multiplier=multiplier)


def _declared_noise(exposure: Exposure, size: int, method: str) -> tuple[dict[str, float], float | None]:
    """The noise on each layer, and the noise multiplier for one sample; clipping of samples is part of the declared training."""
    noise: dict[str, float] = {}
    multiplier: float | None = None
    for defense in exposure.public.defenses:
        absent = not defense.distorts() and defense.scaling() == "none"
        if defense.side == "data" or (defense.side == "update" and not defense.adds_noise() and not absent):
            raise Refused(f"{method} knows noise and dpsgd, and this client has {defense.name}")
        ratio = defense.noise_multiplier_of(None)
        multiplier = ratio[1] if ratio and ratio[0] == "sample" else multiplier
        for name, change in exposure.update.items():
            noise[name] = math.hypot(noise.get(name, 0.0), defense.noise_floor(change, size))
    noise = {name: floor for name, floor in noise.items() if floor > 0}
    if not noise:
        raise Refused(f"{method} needs declared noise, and this client adds none; spans and alignment read an update without noise")
    return noise, multiplier
