"""The sparse vector technique: what selecting entries above a noisy threshold costs, with and without a limit on their number."""

from __future__ import annotations

import math


def split_budget(epsilon: float, answers: int) -> tuple[float, float]:
    """ε of the threshold and ε of the queries, 1 : (2c)^⅔ for c answers above.

    Lyu, Su & Li, "Understanding the Sparse Vector Technique for Differential Privacy", PVLDB 2017: the split that makes the noise of a
    comparison smallest, for queries that are not monotone.
    """
    ratio = (2.0 * answers) ** (2 / 3)
    return epsilon / (1 + ratio), epsilon - epsilon / (1 + ratio)


def selection_epsilon(threshold: float, queries: float, answers: int, *, positives: int) -> float:
    """ε of saying which entries lie above the threshold: ε₁ + ε₂ · positives / c.

    Lyu, Su & Li, Algorithm 7, adds Laplace noise of γ/ε₁ to the threshold and of 2cγ/ε₂ to each query of sensitivity γ, and stops after
    c positive answers. Shift the threshold's noise by γ: that costs ε₁ once, each negative answer is then no less likely in the
    neighbour, and each positive answer costs 2γ / (2cγ/ε₂) = ε₂/c. Hence a run with at most `positives` of them, whatever the number of
    passes over the negative ones. With `positives` = c it is ε₁ + ε₂. Variants that do not stop are those that the paper finds broken.
    """
    return threshold + queries * positives / answers


def release_epsilon(scale: float, bound: float, values: int) -> float:
    """ε of Laplace noise of this scale on `values` entries within ±bound: 2 · bound · values / scale (Dwork et al., TCC 2006)."""
    return math.inf if scale == 0 else 2 * bound * values / scale
