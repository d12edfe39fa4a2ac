"""Low-rank compression of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, working_dtype
from dosimeter.options import PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("low_rank")
@dataclass(frozen=True, kw_only=True)
class LowRank(OutgoingDefense):
    """Sends each layer's matrix as the product of two thin ones, found by power iteration.

    Vogels, Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    NeurIPS 2019: Algorithm 1. A convolution counts as an (outputs × rest) matrix; vectors such as biases, and matrices
    whose smaller side does not exceed `rank`, are sent as they are.
    Departure: no error feedback and no warm start from the last round, since one round is audited; `iterations` stands in
    for the rounds over which a warm start converges to the best approximation.
    """

    promise: ClassVar[str] = "nothing: a batch of at most `rank` samples leaves a linear layer's gradient as it was"
    breaks: ClassVar[str] = "the directions that few samples share; training needs error feedback"

    rank: PositiveInt
    iterations: PositiveInt = 1

    def protect(self, update: Update, rng: Generator) -> Update:
        return {name: self._compressed(change, rng) for name, change in update.items()}

    def _compressed(self, change: Tensor, rng: Generator) -> Tensor:
        if change.ndim < 2 or change.numel() == 0 or min(len(change), change[0].numel()) <= self.rank:
            return change
        matrix = change.flatten(1).to(working_dtype(change))  # (n, m)
        right = torch.randn(matrix.shape[1], self.rank, generator=rng, dtype=matrix.dtype, device=rng.device).to(matrix.device)
        left = matrix.new_zeros(len(matrix), self.rank)
        for _ in range(self.iterations):
            left = torch.linalg.qr(matrix @ right).Q  # (n, rank), orthonormal columns
            right = matrix.T @ left  # (m, rank)
        return (left @ right.T).view_as(change).to(change.dtype)
