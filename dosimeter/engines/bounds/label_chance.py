"""How much of a batch's labels a guess gets right that knows only how common each class is."""

from __future__ import annotations

import torch
from scipy.stats import binom
from torch import Tensor


def best_blind_agreement(frequencies: Tensor, batch_size: int) -> float:
    """The largest mean agreement Σ min(n, n̂) / Σ max(n, n̂) of a fixed guess n̂ with the counts n of independent labels, from above.

    Ours. The denominator is at least the batch size B. The numerator's mean is the sum of P(nᶜ ≥ j) over the classes c and j = 1 … n̂ᶜ, and
    a guess of more than B labels only adds smaller terms. So the B largest of these probabilities, over B, bound it.
    """
    counts = torch.arange(1, batch_size + 1)
    chances = torch.stack([torch.as_tensor(binom.sf(counts - 1, batch_size, float(share))) for share in frequencies])  # (C, B): P(n ≥ j)
    return min(1.0, float(chances.flatten().sort(descending=True).values[:batch_size].sum()) / batch_size)
