"""Label differential privacy by randomised response."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator

from dosimeter.client.checks import check_batch
from dosimeter.interfaces import Client, Defense
from dosimeter.options import NonNegativeFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Accounting, Batch, Guarantee, ProtectedUnit, Refused


@DEFENSES.register("random_labels")
@dataclass(frozen=True, kw_only=True)
class RandomLabels(Defense):
    """Replaces labels at random, as often as the wanted ε demands.

    Warner, "Randomized Response", JASA 1965; for training, Ghazi et al., "Deep Learning with Label Differential Privacy",
    NeurIPS 2021: Algorithm 1 (one stage). A label stays with probability e^ε / (e^ε + C − 1). Otherwise it becomes one of
    the other classes, each equally likely. An infinite ε keeps every label.
    """

    side: ClassVar = "data"
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset()  # each label is drawn by itself
    once: ClassVar[bool] = True  # a new draw in every round would spend ε in every round
    promise: ClassVar[str] = "ε for each label, δ = 0, if a label is randomised once and then reused; nothing for the inputs"
    breaks: ClassVar[str] = "accuracy at small ε, the more the more classes there are"
    strengths: ClassVar = ({"epsilon": 3.0}, {"epsilon": 1.0})

    epsilon: NonNegativeFloat

    def distorts(self) -> bool:
        return False

    def guarantee(self, accounting: Accounting, previous: Defense | None) -> Guarantee | None:
        return None if math.isinf(self.epsilon) else Guarantee(epsilon=self.epsilon, delta=0.0, unit="label", source=self.name)

    def __call__(self, client: Client, rng: Generator) -> Client:
        targets = client.batch.targets
        if targets.ndim != 1:
            raise Refused("random_labels randomises class ids; this batch has soft labels, so list it before what mixes or smooths them")
        classes = max(2, check_batch(client.model, client.batch, "batch"))
        keep = keep_probability(self.epsilon, classes)
        stays = torch.rand(targets.shape, generator=rng, dtype=torch.float64, device=rng.device) < keep  # (B,)
        shift = torch.randint(1, classes, targets.shape, generator=rng, device=rng.device)
        answered = torch.where(stays.to(targets.device), targets, (targets + shift.to(targets)) % classes)
        return replace(client, batch=Batch(client.batch.inputs, answered))


def keep_probability(epsilon: float, classes: int) -> float:
    """The probability e^ε / (e^ε + C − 1) with which a label must stay for ε."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))
