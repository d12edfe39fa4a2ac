"""Differential privacy accounting: how much ε a mechanism spends, as pure functions of its numbers.

The Rényi and Gaussian accountants are computed here and equal Opacus's; the tighter PRV accountant is Opacus's own,
imported when it is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, gammasgn, log_ndtr, logsumexp, ndtr

Accountant = Literal["rdp", "gdp", "prv"]

RDP_ORDERS: tuple[float, ...] = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64))  # those that Opacus tries


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy, and for whom."""

    epsilon: float
    delta: float
    unit: Literal["sample", "client", "label"]  # what may be exchanged without the update's distribution telling
    source: str  # the defenses it comes from, and how it was computed


def gaussian_epsilon(
    *, noise_multiplier: float, sample_rate: float = 1.0, steps: int = 1, delta: float = 1e-5, accountant: Accountant = "rdp"
) -> float:
    """ε at δ of `steps` Gaussian mechanisms whose noise is `noise_multiplier` times the sensitivity, each on a Poisson sample.

    `rdp`: Mironov, Talwar & Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019, turned into (ε, δ) by
    Balle et al., "Hypothesis Testing Interpretations and Rényi Differential Privacy", AISTATS 2020, Theorem 21; an upper bound.
    `gdp`: Dong, Roth & Su, "Gaussian Differential Privacy", JRSS-B 2022, by its central limit theorem; an approximation.
    `prv`: Gopi, Lee & Wutschitz, "Numerical Composition of Differential Privacy", NeurIPS 2021; an upper bound, the tightest.
    """
    if not 0 <= sample_rate <= 1 or not 0 < delta < 1 or steps < 0 or not noise_multiplier >= 0:
        raise ValueError(
            "privacy: expected noise_multiplier >= 0, sample_rate in [0, 1], steps >= 0 and delta in (0, 1), "
            f"got {noise_multiplier}, {sample_rate}, {steps} and {delta}"
        )
    if sample_rate == 0 or steps == 0 or math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    match accountant:
        case "rdp":
            spent = steps * np.array([_sampled_gaussian_rdp(order, sample_rate, noise_multiplier) for order in RDP_ORDERS])
            return rdp_to_epsilon(np.array(RDP_ORDERS), spent, delta)
        case "gdp":
            return _gdp_epsilon(_poisson_mu(steps, noise_multiplier, sample_rate), delta)
        case "prv":
            return _prv_epsilon(noise_multiplier, sample_rate, steps, delta)


def rdp_to_epsilon(orders: NDArray[np.float64], spent: NDArray[np.float64], delta: float) -> float:
    """The smallest ε over the orders α: R(α) + log((α − 1)/α) − (log δ + log α)/(α − 1)."""
    epsilons = spent + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(np.nanmin(epsilons)))


def randomised_response_epsilon(keep: float, classes: int) -> float:
    """ε of a label that stays with probability `keep` and is otherwise uniform over the other classes; δ is 0."""
    return math.inf if keep >= 1 else abs(math.log(keep * (classes - 1) / (1 - keep)))


def randomised_response_keep(epsilon: float, classes: int) -> float:
    """The probability e^ε / (e^ε + C − 1) with which a label must stay for ε."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def _sampled_gaussian_rdp(order: float, rate: float, sigma: float) -> float:
    """R(α) of one step: log A_α / (α − 1); without sampling α / 2σ²."""
    if rate == 1:
        return order / (2 * sigma**2)
    log_moment = _log_moment_integer(int(order), rate, sigma) if order == int(order) else _log_moment_fractional(order, rate, sigma)
    return log_moment / (order - 1)


def _log_moment_integer(order: int, rate: float, sigma: float) -> float:
    """log Σ_k C(α, k) (1 − q)^(α−k) q^k exp((k² − k)/2σ²) (Mironov et al., Section 3.3)."""
    k = np.arange(order + 1)
    terms = _log_binomial(order, k) + k * math.log(rate) + (order - k) * math.log1p(-rate) + (k * k - k) / (2 * sigma**2)
    return float(np.asarray(logsumexp(terms)))


def _log_moment_fractional(order: float, rate: float, sigma: float) -> float:
    """The two half-line integrals of Mironov et al., Section 3.3, as series; summed until the terms vanish."""
    middle = sigma**2 * math.log(1 / rate - 1) + 0.5  # where both summands of the mixture are equal
    count = 64
    while True:
        k = np.arange(count)
        rest = order - k
        binomial = _log_binomial(order, k)
        below = binomial + k * math.log(rate) + rest * math.log1p(-rate) + (k * k - k) / (2 * sigma**2) + log_ndtr((middle - k) / sigma)
        above = (
            binomial
            + rest * math.log(rate)
            + k * math.log1p(-rate)
            + (rest * rest - rest) / (2 * sigma**2)
            + log_ndtr((rest - middle) / sigma)
        )
        if max(below[-1], above[-1]) < -35 or count >= 2**18:
            return float(np.asarray(logsumexp(np.concatenate([below, above]), b=np.tile(gammasgn(rest + 1), 2))))
        count *= 4


def _log_binomial(order: float, k: NDArray[np.int64]) -> NDArray[np.float64]:
    """log |Γ(α + 1) / (Γ(k + 1) Γ(α − k + 1))|; the sign, for fractional α, is that of Γ(α − k + 1)."""
    return gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)


def _poisson_mu(steps: int, sigma: float, rate: float) -> float:
    """μ of the limit: q √(T (e^(1/σ²) − 1)), Corollary 4 with Poisson sampling."""
    return rate * math.sqrt(steps * math.expm1(1 / sigma**2))


def _gdp_epsilon(mu: float, delta: float) -> float:
    """Where δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) crosses δ (Corollary 1)."""

    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(np.asarray(brentq(excess, 0.0, high, xtol=1e-12)))


def _prv_epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    try:
        from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise ImportError("the PRV accountant is Opacus's: install dosimeter[privacy], or use the rdp accountant") from error
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    return float(accountant.get_epsilon(delta))
