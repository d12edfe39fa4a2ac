"""ROUGE-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.metrics.texts import ngram_overlap, texts_of
from dosimeter.registry import METRICS


@METRICS.register("rouge2")
@dataclass(frozen=True, kw_only=True)
class Rouge2(Metric):
    """Pairs of neighbouring tokens that two texts have in common: F1.

    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL workshop 2004, section 2. Over token ids in place of words.
    """

    surface: ClassVar = "tokens"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "ROUGE-2"
    is_share: ClassVar[bool] = True

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """(B, T) token ids, with -1 behind the end of a text -> (B,)."""
        check_paired(self.name, recovered, truth)
        pairs = zip(texts_of(recovered), texts_of(truth))
        return torch.tensor([ngram_overlap(mine, true, 2) for mine, true in pairs], dtype=torch.float64, device=truth.device)
