"""The Gaussian mechanism: exactly its (ε, δ), the noise of the classical theorem, and what a test of membership reaches."""

from __future__ import annotations

import math

from scipy.special import log_ndtr, ndtr, ndtri

ROUNDING = 1e-12  # relative to a probability: what its computation may lose
BISECTIONS = 200
LARGEST_MOVED = 1e100  # in deviations of the noise; its square is a number still
LEAST_DELTA = 1e-300


def exact_delta(epsilon: float, moved: float) -> float:
    """The smallest δ of noise N(0, 1) on a value that moves by at most `moved`, at this ε.

    Balle & Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018: Theorem 8,
    δ = Φ(Δ/2σ − εσ/Δ) − e^ε Φ(−Δ/2σ − εσ/Δ). Rounded up. Over T rounds `moved` is √T times that of one round (Dong, Roth & Su,
    "Gaussian Differential Privacy", JRSS-B 2022: Corollary 3.3), also where each round depends on those before.
    """
    if moved == 0:
        return 0.0
    if math.isinf(moved):
        return 1.0
    above = float(ndtr(moved / 2 - epsilon / moved))
    below = math.exp(min(0.0, epsilon + float(log_ndtr(-moved / 2 - epsilon / moved))))
    return min(1.0, max(0.0, above - below) + ROUNDING * above)


def exact_epsilon(moved: float, delta: float) -> float:
    """The smallest ε at this δ, rounded up; see `exact_delta`."""
    if moved > LARGEST_MOVED or delta < LEAST_DELTA:
        return math.inf
    if exact_delta(0.0, moved) <= delta:
        return 0.0
    low, high = 0.0, moved**2 / 2 + moved * math.sqrt(2 * math.log(1 / delta))  # the latter suffices: Bun & Steinke 2016, Proposition 1.3
    if exact_delta(high, moved) > delta:
        return math.inf  # δ below what floating-point numbers resolve
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if exact_delta(middle, moved) <= delta else (middle, high)
    return high


def classical_deviation(sensitivity: float, epsilon: float, delta: float) -> float:
    """The noise of the classical theorem, sensitivity · √(2 ln(1.25/δ)) / ε, which suffices for ε below 1 alone.

    Dwork & Roth, "The Algorithmic Foundations of Differential Privacy", 2014: Theorem A.1.
    """
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def found_members(false_alarms: float, *, moved: float | None = None, epsilon: float = math.inf, delta: float = 0.0) -> float:
    """The most members that any test finds at this share of false alarms.

    With `moved`, behind Gaussian noise: Φ(Φ⁻¹(α) + Δ/σ) (Dong, Roth & Su). Else min(e^ε α + δ, 1 − e^−ε (1 − δ − α)) (Kairouz, Oh &
    Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015: Theorem 2.1).
    """
    if moved is not None:
        return 1.0 if math.isinf(moved) else float(ndtr(ndtri(false_alarms) + moved))
    if math.isinf(epsilon):
        return 1.0
    few = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    return max(0.0, min(1.0, few, 1 - math.exp(-epsilon) * (1 - delta - false_alarms)))
