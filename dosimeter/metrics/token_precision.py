"""Precision of the token set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS


@METRICS.register("token_precision")
@dataclass(frozen=True, kw_only=True)
class TokenPrecision(Metric):
    """The share of the recovered tokens that occur in the batch.

    van Rijsbergen, Information Retrieval, 1979. Where nothing is recovered, nothing is wrong: 1.
    """

    surface: ClassVar = "tokens"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "Precision of the token set"
    is_share: ClassVar[bool] = True
    per_batch: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """(..., V) bool, which tokens occur -> one number a set, at least (1,)."""
        check_paired(self.name, recovered, truth, dimensions=1)
        common = (recovered & truth).sum(-1).to(torch.float64)
        total = recovered.sum(-1).to(torch.float64)
        return torch.where(total == 0, 1.0, common / total).reshape(-1)
