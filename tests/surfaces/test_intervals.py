"""Summaries in which misses rank last."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap

from dosimeter.surfaces.intervals import summarize

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=40), st.booleans())
def test_median_and_quantiles_are_numpys(values, higher_is_better):
    summary = summarize(values, higher_is_better)
    expected = np.quantile(values, [0.1, 0.25, 0.5, 0.75, 0.9])
    q10, q25, q75, q90 = summary.quantiles
    assert [q10, q25, summary.median, q75, q90] == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-6)
    assert (summary.count, summary.misses) == (len(values), 0)


@given(st.lists(finite, min_size=2, max_size=30))
def test_the_direction_mirrors_everything_but_the_bootstrap_draws(values):
    up, down = summarize(values, True), summarize([-value for value in values], False)
    assert down.median == pytest.approx(-up.median)
    assert (down.low, down.high) == pytest.approx((-up.high, -up.low))
    assert up.low <= up.median <= up.high


def test_the_interval_is_scipys_percentile_bootstrap():
    values = np.random.default_rng(7).gamma(2.0, size=60)
    reference = bootstrap((values,), np.median, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0)).confidence_interval
    summary = summarize(torch.from_numpy(values), True)
    assert (summary.low, summary.high) == pytest.approx((reference.low, reference.high), abs=0.06)
    assert summarize(values.tolist(), True) == summary


def test_the_interval_holds_the_true_median_about_as_often_as_it_says():
    draws = torch.randn(300, 25, generator=torch.Generator().manual_seed(21))
    intervals = [summarize(row, True) for row in draws]
    held = sum(interval.low <= 0 <= interval.high for interval in intervals)
    assert 0.90 <= held / 300 <= 0.99


def test_misses_stay_in_and_rank_last_in_both_directions():
    psnr = summarize([30.0, None, 20.0, float("nan"), 10.0], True)
    assert (psnr.count, psnr.misses, psnr.median) == (5, 2, 10.0)
    assert psnr.quantiles == (None, None, 20.0, pytest.approx(26.0))
    assert psnr.low is None
    mse = summarize([0.1, None, 0.2, float("nan"), 0.3], False)
    assert (mse.misses, mse.median, mse.high) == (2, 0.3, None)
    assert mse.quantiles == (pytest.approx(0.14), 0.2, None, None)
    assert summarize([50.0, None], True).median is None


def test_infinities_rank_by_their_side():
    worst = summarize([-math.inf, 1.0, 2.0], True)
    assert (worst.misses, worst.median) == (1, 1.0)
    best = summarize([math.inf, math.inf, 2.0], True)
    assert (best.misses, best.median, best.quantiles[0]) == (0, math.inf, 2.0)
    assert not any(isinstance(value, float) and math.isnan(value) for value in (*best.quantiles, best.low, best.high))


def test_one_sample_has_no_interval():
    summary = summarize([3.0], True)
    assert (summary.median, summary.low, summary.high, summary.quantiles) == (3.0, None, None, (3.0,) * 4)


def test_two_to_five_samples_have_their_range_as_interval():
    for count in range(2, 6):
        values = [float(value) for value in range(count)]
        summary = summarize(values, True)
        assert (summary.low, summary.high) == (0.0, count - 1.0)


def test_refuses_no_scores():
    with pytest.raises(ValueError, match="expected at least one score, got none"):
        summarize([], True)
