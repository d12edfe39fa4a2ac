"""Nothing by itself: real English text and a byte-pair vocabulary for `tokens.py`.

The text is the manual that Python brings along (`pydoc_data.topics`), so that nothing is copied and nothing is fetched. The vocabulary is
trained on it by merging the most frequent pair, as Sennrich et al., ACL 2016, do.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from pydoc_data.topics import topics

LETTERS = 256  # ids of single bytes


def sentences() -> list[str]:
    """Sentences of the manual: runs of words that end in a full stop."""
    text = " ".join(" ".join(topics.values()).split())
    return [one.strip() for one in re.findall(r"[A-Z][a-z][^.*`|+=<>{}\[\]_\\\\/]{20,300}\.", text)]


def train(size: int) -> dict[tuple[int, int], int]:
    """The merges of a vocabulary of `size` tokens, in order: pair -> new token."""
    words = Counter(word for text in topics.values() for word in re.findall(r"\s?\S+", text))
    pieces = [list(word.encode()) for word in words]
    counts = list(words.values())
    pairs: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, word in enumerate(pieces):
        for pair in pairwise(word):
            pairs[pair] += counts[index]
            places[pair].add(index)
    merges: dict[tuple[int, int], int] = {}
    queue = [(-count, pair) for pair, count in pairs.items()]  # entries of old counts are skipped
    heapq.heapify(queue)
    for token in range(LETTERS, size):
        while queue and -queue[0][0] != pairs[queue[0][1]]:
            heapq.heappop(queue)
        best = heapq.heappop(queue)[1]
        merges[best] = token
        changed: set[tuple[int, int]] = set()
        for index in places.pop(best):
            word = pieces[index]
            changed |= set(pairwise(word))
            for pair in pairwise(word):
                pairs[pair] -= counts[index]
            pieces[index] = word = merge(word, best, token)
            changed |= set(pairwise(word))
            for pair in pairwise(word):
                pairs[pair] += counts[index]
                places[pair].add(index)
        pairs[best] = 0
        for pair in changed:
            heapq.heappush(queue, (-pairs[pair], pair))
    return merges


def merge(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    merged, place = [], 0
    while place < len(word):
        if tuple(word[place : place + 2]) == pair:
            merged.append(token)
            place += 2
        else:
            merged.append(word[place])
            place += 1
    return merged


class Tokenizer:
    """Text to ids, by the merges in order."""

    def __init__(self, size: int) -> None:
        self.merges = train(size)
        self.encode_word = cache(self._encode_word)

    def __call__(self, text: str) -> list[int]:
        return [token for word in re.findall(r"\s?\S+", text) for token in self.encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        pieces = list(word.encode())
        while len(pieces) > 1:
            pair = min(pairwise(pieces), key=lambda pair: self.merges.get(pair, 2**60))
            if pair not in self.merges:
                break
            pieces = merge(pieces, pair, self.merges[pair])
        return pieces
