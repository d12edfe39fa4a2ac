"""Mixup: pairs of samples and of labels, blended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Generator

from dosimeter.client.checks import check_batch
from dosimeter.client.losses import as_distribution
from dosimeter.interfaces import Attack, Client, Defense, Replay
from dosimeter.options import Constraint
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, ProtectedUnit, Refused, Update

Concentration = Annotated[float, Constraint("a positive finite number", lambda value: 0 < value < math.inf)]


@DEFENSES.register("mixup")
@dataclass(frozen=True, kw_only=True)
class Mixup(Defense):
    """Trains on blends of two samples each, with their labels blended in the same shares.

    Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018 (thesis Table 2.2): x = λ x_i + (1 − λ) x_j, and the
    same for the labels, with λ from Beta(α, α) and j from a random order of the batch. Each sample has its own λ.
    """

    side: ClassVar = "data"
    changes_pixels = True
    replaces: ClassVar[bool] = True
    pairs_labels: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset({"sample"})  # a sample that is blended into several moves several gradients
    promise: ClassVar[str] = "nothing: the blends leak as samples do, and the labels say how they were blended"
    breaks: ClassVar[str] = "little: it is a regulariser; hard labels are gone"
    strengths: ClassVar = ({"alpha": 0.2}, {"alpha": 1.0})

    alpha: Concentration = 1.0

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs, targets = client.batch.inputs, client.batch.targets
        if len(inputs) < 2:
            raise Refused("mixup blends pairs of samples, so it needs a batch of at least two; this batch has one")
        soft = as_distribution(targets, check_batch(client.model, client.batch, "batch"), inputs.dtype)
        partner = torch.randperm(len(inputs), generator=rng, device=rng.device).to(inputs.device)
        share = self._shares(len(inputs), rng).to(inputs)  # (B,)
        image_share = share.view(-1, *[1] * (inputs.ndim - 1))
        mixed = image_share * inputs + (1 - image_share) * inputs[partner]
        labels = share[:, None] * soft + (1 - share[:, None]) * soft[partner]
        return replace(client, batch=Batch(mixed, labels))

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        if any(option.name == "joint_labels" for option in fields(attack)):
            return Replay(note="labels are soft and optimised along with the inputs", options={"joint_labels": True})
        return super().replay(sent, attack, later)

    def _shares(self, count: int, rng: Generator) -> torch.Tensor:
        """λ of each sample; numpy draws it, seeded by `rng`, as PyTorch's Beta takes no generator."""
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        return torch.from_numpy(np.random.default_rng(seed).beta(self.alpha, self.alpha, count))
