"""Overlaps of two texts of token ids: the formulas behind ROUGE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

NO_TOKEN = -1  # behind the end of a text in a tensor of texts


def texts_of(ids: Tensor) -> list[tuple[int, ...]]:
    """(B, T) token ids as texts, without what stands behind their ends."""
    return [tuple(token for token in row if token != NO_TOKEN) for row in ids.tolist()]


def ngram_overlap(one: Sequence[int], other: Sequence[int], length: int) -> float:
    """F1 of the n-grams that two texts have in common, repeats counted; 1 for two texts that are too short to have any and equal."""
    mine, theirs = (Counter(tuple(text[i : i + length]) for i in range(len(text) - length + 1)) for text in (one, other))
    total = sum(mine.values()) + sum(theirs.values())
    return 2 * sum((mine & theirs).values()) / total if total else float(tuple(one) == tuple(other))


def subsequence_overlap(one: Sequence[int], other: Sequence[int]) -> float:
    """F1 of the longest common subsequence, by dynamic programming."""
    if not one or not other:
        return float(tuple(one) == tuple(other))
    lengths = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for place, rival in enumerate(other, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if token == rival else max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(one) + len(other))
