"""Which empty rows pruning explains, so that they are no sign of a server that zeroed them."""

from __future__ import annotations

import torch
from torch import Tensor

UNEVENNESS = 3.0  # how many times more rows pruning empties than chance would: it takes the weights of light rows first


def rows_that_count(weight: Tensor) -> Tensor:
    """Which rows (C,) of a layer (C, H) a check counts: all of them, or only the non-zero ones where pruning explains the zeros.

    Suppose that each entry survives pruning with chance ρ. Then a row is empty with chance (1 − ρ)^H, and a row that is not
    holds Hρ / (1 − (1 − ρ)^H) entries on average. Bisection finds ρ from that average. A filter, in contrast, empties some rows and leaves
    the others full.
    """
    filled = weight.flatten(1) != 0
    not_empty = filled.any(1)
    if bool(not_empty.all()) or not bool(not_empty.any()):
        return torch.ones_like(not_empty)
    entries, width = float(filled[not_empty].double().sum(1).mean()), filled.shape[1]
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        low, high = (chance, high) if width * chance < entries * (1 - (1 - chance) ** width) else (low, chance)
    explained_share = UNEVENNESS * (1 - high) ** width
    return not_empty if float((~not_empty).double().mean()) <= explained_share else torch.ones_like(not_empty)
