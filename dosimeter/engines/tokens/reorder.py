"""Texts with the same tokens in another order: four kinds of changes, drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator


def draw_order(length: int, kind: int, rng: Generator) -> list[int]:
    """A new order of `length` places: two swapped (0), one moved (1), a run of places moved (2), or the beginning put at the end (3)."""

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=rng, device=rng.device))

    order = list(range(length))
    if length < 2:
        return order
    if kind == 0:
        i, j = draw(length), draw(length)
        order[i], order[j] = order[j], order[i]
    elif kind == 1:
        order.insert(draw(length), order.pop(draw(length)))
    elif kind == 2:
        begin = draw(length - 1)
        end = begin + 1 + draw(length - begin)
        rest = order[:begin] + order[end:]
        place = draw(len(rest) + 1)
        order = rest[:place] + order[begin:end] + rest[place:]
    else:
        cut = 1 + draw(length - 1)
        order = order[cut:] + order[:cut]
    return order


def best_order(length: int, value: Callable[[list[int]], float], proposals: int, rng: Generator) -> list[int]:
    """The order with the lowest value among the present one and as many `proposals`, all kinds in turn."""
    orders = [list(range(length)), *(draw_order(length, kind % 4, rng) for kind in range(proposals))]
    return min(orders, key=value)
