"""Medians, quantiles and intervals of scores. A miss counts as the worst score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.randomness import generator

INTERVAL_LEVEL = 0.95  # of the bootstrap interval
RESAMPLES = 2000

Values = Sequence[float | None] | Tensor


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Scores of many samples in a few numbers. None: that number is a miss.

    Misses (None or nan) rank below every score, so that an attack cannot gain by recovering less.
    """

    count: int  # misses included
    misses: int
    median: float | None
    low: float | None  # of the median's interval; one sample has none
    high: float | None
    quantiles: tuple[float | None, float | None, float | None, float | None]  # 10, 25, 75 and 90 %, in ascending order of the value


def summarize(values: Values, higher_is_better: bool) -> Summary:
    """Median, quantiles and the percentile bootstrap interval of the median (Efron 1979), the same in every run.

    An infinitely bad score ranks with the misses; an infinitely good one is kept. A quantile between a finite and an infinite
    score takes the worse of the two. With two to five samples the interval is their whole range, which holds the median with
    probability 1 − 2^(1−n) only: so few samples have no interval at 95 %.
    """
    scores = _advantage(values, higher_is_better)  # (n,), more is better, a miss is −∞
    if len(scores) == 0:
        raise ValueError("summary: expected at least one score, got none")
    shares = [float(_quantile(scores, share)) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
    interval = _bootstrap(scores) if len(scores) > 1 else (-math.inf, -math.inf)
    if not higher_is_better:
        shares, interval = [-share for share in reversed(shares)], (-interval[1], -interval[0])
    worst = -math.inf if higher_is_better else math.inf
    q10, q25, median, q75, q90, low, high = (None if value == worst else value + 0.0 for value in (*shares, *interval))
    return Summary(
        count=len(scores),
        misses=int((scores == -math.inf).sum()),
        median=median,
        low=low,
        high=high,
        quantiles=(q10, q25, q75, q90),
    )


def _advantage(values: Values, higher_is_better: bool) -> Tensor:
    """The scores as float64 (n,), turned so that more is better and a miss is −∞."""
    if isinstance(values, Tensor):
        scores = values.detach().to("cpu", torch.float64).flatten()
    else:
        scores = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float64)
    scores = scores if higher_is_better else -scores
    return torch.where(scores.isnan(), -math.inf, scores)


def _bootstrap(scores: Tensor) -> tuple[float, float]:
    rng = generator(0, "bootstrap of the median")
    draws = scores[torch.randint(len(scores), (RESAMPLES, len(scores)), generator=rng)]  # (R, n)
    medians = _quantile(draws, 0.5)  # (R,)
    return float(_quantile(medians, (1 - INTERVAL_LEVEL) / 2)), float(_quantile(medians, (1 + INTERVAL_LEVEL) / 2))


def _quantile(scores: Tensor, share: float) -> Tensor:
    """The quantile along the last dimension, interpolated between neighbours that are both finite, else the lower one."""
    ordered = scores.sort(-1).values
    position = round(share * (ordered.shape[-1] - 1), 9)  # a whole number stays one
    below, above = ordered[..., math.floor(position)], ordered[..., math.ceil(position)]
    between = below + (position - math.floor(position)) * (above - below)
    return torch.where(below.isfinite() & above.isfinite(), between, below)
