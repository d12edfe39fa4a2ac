"""Samples matched with the truth and compared, beside their nulls."""

import math

import pytest
import torch

from dosimeter.registry import METRICS
from dosimeter.surfaces.scores import choose_metrics, columns_of, compare_samples, median, number, score_samples

TRUTH = torch.tensor([[0.0, 0.0], [1.0, 1.0], [4.0, 4.0]])
GRAY = torch.full((3, 2), 0.5)


def scores_of(recovered, **options):
    given = {"auxiliary": None, "foreign": None, "blind": ("gray", GRAY), "metrics": ["mse"]} | options
    return score_samples("inputs", recovered=recovered, truth=TRUTH, **given)


def test_each_value_is_of_the_partner_and_a_miss_is_nan():
    scores = scores_of(torch.tensor([[4.0, 4.0], [torch.nan, 0.0], [0.0, 2.0]]))
    assert scores.assignment.tolist() == [-1, 2, 0]
    assert scores.misses == 1
    assert scores["mse"].isnan().tolist() == [True, False, False]
    assert scores["mse"][1:].tolist() == [1.0, 0.0]
    assert (list(scores), len(scores)) == (["mse"], 1)


def test_the_nulls_are_the_mean_the_nearest_the_foreign_and_the_methods_own():
    auxiliary = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    scores = scores_of(TRUTH, auxiliary=auxiliary, foreign=TRUTH + torch.tensor([0.5, -0.5]), own={"drawn": TRUTH[:1]})
    assert {null: columns["mse"].tolist()[:2] for null, columns in scores.nulls.items()} == {
        "mean": [4.0, 1.0],
        "nearest": [1.0, 0.0],
        "foreign": [0.25, 0.25],
        "drawn": [0.0, pytest.approx(math.nan, nan_ok=True)],
    }
    assert "1 of 3 private samples" in scores.warnings[0]


def test_without_auxiliary_data_the_null_is_the_blind_one():
    scores = scores_of(TRUTH)
    assert scores.as_lists() == ({"mse": [0.0, 0.0, 0.0]}, {"gray": {"mse": [0.25, 0.25, 12.25]}})
    assert scores.warnings == ()


def test_a_partner_is_looked_up_by_its_index():
    metric = {"mse": METRICS.build("mse")}
    found = compare_samples(metric, TRUTH, TRUTH, torch.tensor([1, 1, -1]))["mse"]
    assert found[:2].tolist() == [1.0, 0.0]
    assert math.isnan(found[2])
    assert found.dtype == torch.float64


def test_metrics_are_those_of_the_surface_that_fit_the_shape():
    usable, unavailable = choose_metrics(None, "inputs", (2,))
    assert set(usable) == {"psnr", "mse"}
    assert set(unavailable) == {"ssim", "lpips", "registered_lpips", "identification", "columns_right"}
    assert "columns_right" not in set().union(*choose_metrics(None, "inputs", (3, 32, 32)))
    assert all(metric.surface == "inputs" for metric in usable.values())
    with pytest.raises(ValueError, match="insacc scores labels"):
        choose_metrics(["insacc"], "inputs", (2,))


def test_a_truth_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="truth: has NaN"):
        score_samples("inputs", recovered=TRUTH, truth=TRUTH / 0, auxiliary=None, foreign=None, blind=("gray", GRAY), metrics=["mse"])


def test_misses_columns_and_medians():
    assert number(None, 7.0) == number(math.nan, 7.0) == 7.0
    assert number(0.0, 7.0) == 0.0
    assert columns_of({"mean": {"mse": [1.0]}, "prior": {"insacc": [0.5]}}, "mse") == [[1.0]]
    assert (median([3.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])) == (2.0, 2.5)
