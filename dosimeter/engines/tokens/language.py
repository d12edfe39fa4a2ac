"""How likely a text is in a language that is known from examples alone: pairs of neighbouring tokens, counted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dosimeter.network.token_inputs import texts_of_batch
from dosimeter.types import Batch

PAIRS_SHARE, SINGLES_SHARE = 0.7, 0.29  # of the probability, given to counted pairs and counted tokens; the rest to all tokens alike


@dataclass(frozen=True, kw_only=True)
class PairCounts:
    """P(b | a) = .7 n(a, b) / n(a) + .29 n(b) / n + .01 / V (Jelinek and Mercer 1980); without examples, every text is as likely."""

    vocabulary: int
    pairs: dict[tuple[int, int], int]
    singles: Tensor  # (V,) float64

    def surprise(self, ids: Tensor) -> Tensor:
        """The mean of −log P over the tokens of each text (n, T): (n,) float64."""
        if not float(self.singles.sum()):
            return torch.zeros(len(ids), dtype=torch.float64)
        alone = SINGLES_SHARE * self.singles / self.singles.sum() + (1 - PAIRS_SHARE - SINGLES_SHARE) / self.vocabulary
        rows = ids.tolist()
        behind = [[self.pairs.get(pair, 0) / max(float(self.singles[pair[0]]), 1.0) for pair in pairwise(row)] for row in rows]
        chances = alone[ids.cpu()]
        chances[:, 1:] += PAIRS_SHARE * torch.tensor(behind, dtype=torch.float64).reshape(len(rows), -1)
        return -chances.log().mean(1)


def pair_counts(auxiliary: Batch | None, vocabulary: int) -> PairCounts:
    """Counts over the texts that the server has."""
    texts = [] if auxiliary is None else texts_of_batch(auxiliary)
    pairs: dict[tuple[int, int], int] = {}
    for pair in (pair for text in texts for pair in pairwise(text)):
        pairs[pair] = pairs.get(pair, 0) + 1
    ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    return PairCounts(vocabulary=vocabulary, pairs=pairs, singles=torch.bincount(ids, minlength=vocabulary).double())
