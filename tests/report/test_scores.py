import math

import pytest

from dosimeter.report.scores import score, score_range


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
