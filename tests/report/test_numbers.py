import math

import pytest

from dosimeter.report.numbers import duration, power_of_ten, score, score_range, significant


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (24.06, "psnr", "24.1\u202fdB"),
        (-3.0, "psnr", "−3.0\u202fdB"),
        (0.9375, "insacc", "93.8\u202f%"),
        (1.0, "clsacc", "100\u202f%"),
        (3.21e-5, "feature_error", "3.2×10⁻⁵"),
        (0.0344, "mse", "0.0344"),
        (0.5, "a_metric_of_tomorrow", "0.500"),
        (None, "psnr", "miss"),
        (math.nan, "psnr", "miss"),
        (math.inf, "psnr", "∞"),
    ],
)
def test_score(value, metric, text):
    assert score(value, metric) == text


def test_a_range_writes_its_unit_once_and_a_point_is_no_range():
    assert score_range(7.04, 17.2, "psnr") == "7.0 – 17.2\u202fdB"
    assert score_range(1.0, 1.0, "insacc") == "100\u202f%"
    assert score_range(None, 17.2, "psnr") == "miss – 17.2\u202fdB"


@pytest.mark.parametrize("value", [1.0, 9.99, 123.0, 0.001, 0.0102, 54321.0, -2.5e-7, 8e9])
def test_three_digits_stay_within_rounding_of_the_value(value):
    text = significant(value).replace("−", "-")
    digits, _, power = text.partition("×10")
    exponent = int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)
    assert float(digits) * 10.0**exponent == pytest.approx(value, rel=0.05)


def test_powers_of_ten():
    assert [power_of_ten(power) for power in (-6, -2, 0, 1, 5)] == ["10⁻⁶", "0.01", "1", "10", "10⁵"]


@pytest.mark.parametrize(("seconds", "text"), [(0.021, "0.02 s"), (21.44, "21.4 s"), (125.0, "2 min 05 s")])
def test_duration(seconds, text):
    assert duration(seconds).replace("\u202f", " ") == text
