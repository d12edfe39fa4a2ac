"""The best chance that any attacker has to recover a sample behind DP-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom
from torch import Generator, Tensor

DRAWS_AT_ONCE = 2**22  # Gaussian numbers held in memory at one time


@dataclass(frozen=True, kw_only=True)
class SuccessBound:
    """The largest probability with which an attacker recovers a sample. `low` and `high` bracket `value`."""

    value: float
    low: float
    high: float  # no attacker does better than this, with the confidence below
    confidence: float  # of the bracket; 1 where the value is exact
    chance: float  # the attacker's success without the update


def success_bound(
    *,
    noise_multiplier: float,
    chance: float,
    sample_rate: float = 1.0,
    steps: int = 1,
    draws: int = 100_000,
    confidence: float = 0.99,
    rng: Generator | None = None,
) -> SuccessBound:
    """The success of the best attacker on DP-SGD, who succeeds with probability `chance` without seeing an update.

    Hayes, Mahloujifar & Balle, "Bounding Training Data Reconstruction in DP-SGD", NeurIPS 2023: Theorem 2 and Corollary 3. The attacker
    knows all other samples, the model and every intermediate update. Let ν be the noise alone, N(0, σ²) in each of the `steps`, and let μ
    add to it a one wherever the sample is drawn, with probability `sample_rate`. The bound is the largest μ(E) of the events E with
    ν(E) ≤ `chance`. By Neyman and Pearson, E holds the largest likelihood ratios.

    With all samples in each step the ratio is monotone in the sum, so that μ(E) = Φ(Φ⁻¹(chance) + √steps / σ), exactly. Else E and μ(E)
    come
    from Monte Carlo draws.
    Departure: the paper reports the estimate. Here independent draws of ν and μ give the threshold and the probability, each with an exact
    binomial interval. Therefore `high` bounds every attacker with the given confidence.
    """
    _check(noise_multiplier, chance, sample_rate, steps, draws, confidence)
    if steps == 0 or sample_rate == 0 or math.isinf(noise_multiplier) or chance in (0.0, 1.0):
        return SuccessBound(value=chance, low=chance, high=chance, confidence=1.0, chance=chance)
    if noise_multiplier == 0:
        return SuccessBound(value=1.0, low=1.0, high=1.0, confidence=1.0, chance=chance)
    if sample_rate == 1:
        value = float(ndtr(ndtri(chance) + math.sqrt(steps) / noise_multiplier))
        return SuccessBound(value=value, low=value, high=value, confidence=1.0, chance=chance)
    setting = (noise_multiplier, sample_rate, steps, draws, rng or torch.Generator().manual_seed(0))
    without = log_ratios(*setting, drawn=False).sort(descending=True).values  # under ν
    present = log_ratios(*setting, drawn=True)  # under μ
    doubt = (1 - confidence) / 4  # two thresholds and two probabilities share it
    fewest, most = int(binom.ppf(doubt, draws, chance)), int(binom.ppf(1 - doubt, draws, chance)) + 1
    value = float((present >= _threshold(without, round(draws * chance))).double().mean())
    low = _binomial_quantile(int((present > _threshold(without, fewest)).sum()), draws, doubt)
    high = _binomial_quantile(int((present >= _threshold(without, most)).sum()) + 1, draws, 1 - doubt)
    return SuccessBound(value=max(value, chance), low=max(low, chance), high=max(high, chance), confidence=confidence, chance=chance)


def log_ratios(noise: float, rate: float, steps: int, draws: int, rng: Generator, *, drawn: bool) -> Tensor:
    """log μ(w)/ν(w) at draws w of μ (`drawn`) or of ν: the sum of log(1 − q + q·exp((w − 1/2)/σ²)) over the steps. (draws,)"""
    total = torch.zeros(draws, dtype=torch.float64)
    rows = max(1, DRAWS_AT_ONCE // draws)
    for first in range(0, steps, rows):
        shape = (min(rows, steps - first), draws)
        seen = noise * torch.randn(shape, generator=rng, dtype=torch.float64)
        if drawn:
            seen += (torch.rand(shape, generator=rng, dtype=torch.float64) < rate).double()
        total += torch.logaddexp(torch.full_like(seen, math.log1p(-rate)), math.log(rate) + (seen - 0.5) / noise**2).sum(0)
    return total


def _threshold(descending: Tensor, count: int) -> float:
    """The ratio that `count` of the draws reach: −∞ for more than there are, ∞ for none."""
    if count < 1:
        return math.inf
    return float(descending[count - 1]) if count <= len(descending) else -math.inf


def _binomial_quantile(successes: int, draws: int, level: float) -> float:
    """Clopper and Pearson's limit: the `level` quantile of Beta(successes, draws − successes + 1)."""
    if successes < 1:
        return 0.0
    return 1.0 if successes > draws else float(betaincinv(successes, draws - successes + 1, level))


def _check(noise_multiplier: float, chance: float, sample_rate: float, steps: int, draws: int, confidence: float) -> None:
    if not noise_multiplier >= 0 or not 0 <= chance <= 1 or not 0 <= sample_rate <= 1 or steps < 0:
        raise ValueError(
            "success_bound: expected noise_multiplier >= 0, chance and sample_rate in [0, 1] and steps >= 0, "
            f"got {noise_multiplier}, {chance}, {sample_rate} and {steps}"
        )
    if not 0 < confidence < 1 or draws < 1 or (chance > 0 and draws * chance < 20 and sample_rate < 1):
        raise ValueError(
            "success_bound: expected a confidence in (0, 1) and draws >= 20 / chance, "
            f"got {confidence} and {draws} draws for a chance of {chance:g}"
        )
