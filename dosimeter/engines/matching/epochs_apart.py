"""A replay in which each local epoch has guesses of its own, since nobody knows the client's order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.client.gradients import Gradient
from dosimeter.client.training import FedAvg, Replayable
from dosimeter.engines.matching.priors import Prior, Seen
from dosimeter.options import PositiveInt
from dosimeter.types import Update


@dataclass(frozen=True, kw_only=True)
class EpochsApart(Replayable):
    """FedAvg on the guesses of all epochs, one after the other: epoch e trains on the samples from e · B on, in their order."""

    name: ClassVar[str] = "epochs_apart"

    each: FedAvg
    batch_size: PositiveInt

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        epoch, groups = -1, []
        for group in self.each.groups(self.batch_size):
            epoch += group[0].start == 0
            first = epoch * self.batch_size
            groups.append(tuple(slice(first + piece.start, first + piece.stop) for piece in group))
        return self.each.replay_on(gradient, parameters, buffers, inputs, targets, groups, self.batch_size)

    def epochs(self) -> int:
        """How often the client begins anew with its samples."""
        return sum(group[0].start == 0 for group in self.each.groups(self.batch_size))

    def local_steps(self, batch_size: int | None) -> int:
        return self.each.local_steps(self.batch_size)

    def unit(self, batch_size: int | None) -> float:
        return self.each.unit(self.batch_size)

    def gain(self, batch_size: int | None) -> float | None:
        return self.each.gain(self.batch_size)

    def decay(self, batch_size: int | None) -> float:
        return self.each.decay(self.batch_size)

    def preconditioning(self) -> str:
        return self.each.preconditioning()


@dataclass(frozen=True, kw_only=True)
class SameInEveryEpoch(Prior):
    """All epochs hold the same samples in some order: what does not depend on the order is equal. Here the mean image of each label.

    Dimitrov et al., TMLR 2022: the epoch order-invariant prior, with the mean as the aggregate g and squared distances between epochs.
    """

    labels: tuple[int, ...]  # (B,) of one epoch

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        size = len(self.labels)
        by_epoch = inputs.reshape(math.ceil(len(inputs) / size), size, -1)  # (E, B, D)
        present = sorted(set(self.labels))
        member = torch.tensor([[label == one for one in present] for label in self.labels], device=inputs.device).to(inputs)  # (B, L)
        means = torch.einsum("ebd,bl->eld", by_epoch, member / member.sum(0))
        return (means - means.mean(0)).square().mean()
