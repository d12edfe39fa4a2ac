import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dosimeter.report.plots import HEIGHT, Scale, error_plot, sample_plot, sample_scale, share_plot
from dosimeter.surfaces.inputs import beats_nulls


@given(st.floats(1e-12, 1e6), st.floats(1e-12, 1e6), st.booleans())
def test_a_scale_keeps_the_order_and_its_ends(one, two, logarithmic):
    scale = Scale(low=1e-3, high=1e3, logarithmic=logarithmic)
    assert 0 <= scale.at(one) <= 1
    assert (scale.at(one) <= scale.at(two)) == (one <= two) or scale.at(one) == scale.at(two)
    assert (scale.at(1e-3), scale.at(1e3)) == (0, 1)


def test_a_logarithmic_scale_has_equal_steps_for_equal_ratios():
    scale = Scale(low=1e-4, high=1, logarithmic=True)
    assert [scale.at(10.0**power) for power in (-3, -2, -1)] == pytest.approx([0.25, 0.5, 0.75])


def test_share_plot_places_scores_and_guessing_in_per_cent():
    plot = share_plot([("ilrg", {"insacc": [0.9]}, {"prior": {"insacc": [0.25]}})], "insacc")
    assert plot is not None
    (strip,) = plot.strips
    assert strip.dots == [90.0]
    assert strip.bands[0].median == 25.0
    assert strip.text == "90\u202f%"
    assert strip.summary == "InsAcc of ilrg: median 90\u202f% of 1; nulls: guessing 25\u202f%"


def test_a_band_spans_the_middle_nine_tenths_of_a_null():
    plot = share_plot([("ilrg", {"insacc": [1.0]}, {"guess": {"insacc": [i / 100 for i in range(101)]}})], "insacc")
    assert plot is not None
    band = plot.strips[0].bands[0]
    assert (band.start, band.start + band.width, band.median) == pytest.approx((5, 95, 50))


def test_nothing_to_plot_is_no_plot():
    assert share_plot([("direct", {}, {})], "insacc") is None
    assert error_plot([], "feature_error") is None


def test_error_plot_counts_misses_and_draws_the_others():
    plot = error_plot(
        [("subspace", {"feature_error": [1e-4, 1e-2, None, math.nan]}, {"zero": {"feature_error": [1.0] * 4}})], "feature_error"
    )
    assert plot is not None
    assert plot.strips[0].misses == 2
    assert plot.strips[0].dots == pytest.approx([0.0, 50.0])
    assert [tick.text for tick in plot.ticks] == ["10⁻⁴", "10⁻³", "0.01", "0.1", "1"]


def test_sample_plot_puts_the_better_score_higher_and_the_stem_on_the_best_null():
    found, nulls = [30.0, 12.0], {"mean": {"psnr": [10.0, 11.0]}, "nearest": {"psnr": [20.0, 9.0]}}
    scale = sample_scale([(found, nulls)], "psnr")
    assert (scale.low, scale.high) == (0, 30)
    first, second = sample_plot("dlg", found, nulls, "psnr", scale, beats_nulls).columns
    assert first.score == 0
    assert first.rival == pytest.approx(HEIGHT / 3, abs=0.1)
    assert (first.beats, second.beats) == (True, False)
    assert first.score < second.score  # type: ignore[operator]


def test_a_missed_sample_has_a_column_and_no_dot():
    nulls = {"mean": {"psnr": [10.0, 11.0]}}
    plot = sample_plot("dlg", [None, 12.0], nulls, "psnr", sample_scale([([None, 12.0], nulls)], "psnr"), beats_nulls)
    assert [column.score is None for column in plot.columns] == [True, False]
    assert len(plot.columns[0].nulls) == 1
