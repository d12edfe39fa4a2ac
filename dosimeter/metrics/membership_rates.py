"""The share of members that a test finds while it lets at most a given share of other samples pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dosimeter.metrics import check_paired


def found_at(rate: float, scores: Tensor, inside: Tensor, name: str) -> Tensor:
    """Of candidates with `scores` (n,), of which those `inside` (n,) bool are members, the share of members found: (1,).

    The threshold lets at most `rate` of the others pass. With fewer than 1/rate others it lets none pass.
    """
    check_paired(name, scores, inside, dimensions=1)
    members, others = scores[inside].double().nan_to_num(nan=-torch.inf), scores[~inside].double().nan_to_num(nan=-torch.inf)
    if not len(members):
        return torch.full((1,), torch.nan, dtype=torch.float64)
    return (members > threshold_at(rate, others)).double().mean().reshape(1)


def threshold_at(rate: float, others: Tensor) -> float:
    """The score that at most `rate` of the others (n,) exceed."""
    allowed = allowed_alarms(rate, len(others))
    return float(others.sort(descending=True).values[allowed]) if allowed < len(others) else -math.inf


def allowed_alarms(rate: float, others: int) -> int:
    """How many of so many others may pass."""
    return math.floor(rate * others)


def rate_of(alarms: int, others: int) -> float:
    """The probability that a sample outside the batch passes as a member would, above all but `alarms` of the others.

    It takes any place among the others alike: (alarms + 1) / (others + 1). Of few others this is more than the share that passes.
    """
    return min(1.0, (alarms + 1) / (others + 1))
