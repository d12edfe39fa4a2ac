"""Exact texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.metrics.texts import texts_of
from dosimeter.registry import METRICS


@METRICS.register("sequence_match")
@dataclass(frozen=True, kw_only=True)
class SequenceMatch(Metric):
    """Whether a text is recovered token by token: 1 or 0.

    The exact match of question answering (Rajpurkar et al., EMNLP 2016), over token ids.
    """

    surface: ClassVar = "tokens"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "Exact texts"
    is_share: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """(B, T) token ids, with -1 behind the end of a text -> (B,)."""
        check_paired(self.name, recovered, truth)
        pairs = zip(texts_of(recovered), texts_of(truth))
        return torch.tensor([float(mine == true) for mine, true in pairs], dtype=torch.float64, device=truth.device)
