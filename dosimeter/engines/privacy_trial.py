"""What a trial shows of a mechanism's ε: its outputs for two neighbours, told apart by the best test."""

from __future__ import annotations

import math

import torch
from scipy.special import betaincinv
from torch import Tensor

CANDIDATES = 200  # thresholds that are tried on the first half of the draws


def shown_epsilon(first: Tensor, second: Tensor, delta: float, confidence: float = 0.95) -> float:
    """A lower bound on ε at δ, from scores (n,) of outputs for one client and for its neighbour, with this confidence.

    Jagielski, Ullman & Oprea, "Auditing Differentially Private Machine Learning", NeurIPS 2020: a test with power t at false alarms f
    needs ε ≥ ln((t − δ) / f). Clopper and Pearson's intervals bound t and f. Half of the draws choose the threshold and the other half
    test it, so that the choice costs no confidence.
    """
    choose, test = ((first[0::2], second[0::2]), (first[1::2], second[1::2]))
    thresholds = torch.cat(choose).double().quantile(torch.linspace(0, 1, CANDIDATES, dtype=torch.float64))
    tried = [(_bound(*choose, float(t), sign, delta, confidence), float(t), sign) for t in thresholds for sign in (1, -1)]
    _, threshold, sign = max(tried)
    return max(0.0, _bound(*test, threshold, sign, delta, confidence))


def _bound(first: Tensor, second: Tensor, threshold: float, sign: int, delta: float, confidence: float) -> float:
    """ln((t − δ) / f) of the test `sign · score > sign · threshold`, t from below and f from above; −∞ where t may be δ."""
    doubt = (1 - confidence) / 2  # two intervals share it
    found, alarms = (int((sign * one > sign * threshold).sum()) for one in (first, second))
    power = float(betaincinv(found, len(first) - found + 1, doubt)) if found else 0.0
    false = float(betaincinv(alarms + 1, len(second) - alarms, 1 - doubt)) if alarms < len(second) else 1.0
    return math.log((power - delta) / false) if power > delta else -math.inf
