"""Rows that are all zero because the whole layer was pruned, and not because a server zeroed them."""

from __future__ import annotations

import torch
from torch import Tensor

UNEVEN = 3.0  # times as many zero rows as evenly spread entries leave: pruning takes the small weights of light rows first


def rows_that_count(weight: Tensor) -> Tensor:
    """Which rows (C,) of a layer (C, H) tell of a server: all of them, unless pruning explains those that are zero.

    Where each entry survives with chance ρ a row is all zero with chance (1 − ρ)^H, and the others hold Hρ / (1 − (1 − ρ)^H)
    entries, of which ρ is found by bisection. A filter leaves rows as full as they were, or none.
    """
    filled = weight.flatten(1) != 0
    kept = filled.any(1)
    if bool(kept.all()) or not bool(kept.any()):
        return torch.ones_like(kept)
    entries, width = float(filled[kept].double().sum(1).mean()), filled.shape[1]
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        low, high = (chance, high) if width * chance < entries * (1 - (1 - chance) ** width) else (low, chance)
    explained = UNEVEN * (1 - high) ** width
    return kept if float((~kept).double().mean()) <= explained else torch.ones_like(kept)
