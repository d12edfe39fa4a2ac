import math
from dataclasses import replace

import pytest

from dosimeter.runs.reproduction.quantities import check_quantity, figure_of, is_error
from dosimeter.types import Record


def record(counts=(), **metrics):
    empty = {"nulls": {}, "warnings": [], "versions": {}, "threat_model": {}, "config": {}, "seconds": 0.0, "seed": 0}
    words = {"key": "k", "surface": "labels", "method": "m", "outcome": "completed", "verdict": "leaked", "reason": ""}
    return Record(**empty, **words, metrics=metrics, details={"counts": list(counts)})


def test_a_metric_is_averaged_over_samples_then_over_trials():
    figure = figure_of("insacc", [record(insacc=[1.0]), record(insacc=[0.0, 1.0]), record(insacc=[0.0])])
    assert figure is not None
    assert (figure.mean, figure.trials) == (0.5, 3)
    assert figure.standard_error == pytest.approx(0.5 / math.sqrt(3))


def test_shares_and_errors_below_a_bound():
    records = [record(label_l1=[1e-5]), record(label_l1=[3e-5]), record(label_l1=[0.5]), record(label_l1=[None])]
    assert figure_of("label_l1_below_0.001", records).mean == 0.5  # type: ignore[union-attr]
    small = figure_of("label_l1_where_below_0.001", records)
    assert small is not None
    assert small.mean == pytest.approx(2e-5)
    assert small.trials == 2


def test_counts_of_a_class():
    records = [record(counts=[0, 3], leacc=[1.0]), record(counts=[0, 4], leacc=[1.0])]
    assert figure_of("count_1", records).mean == 3.5  # type: ignore[union-attr]


def test_refused_trials_give_nothing():
    assert figure_of("insacc", [record()]) is None
    assert figure_of("insacc", [record(), record(insacc=[1.0])]).trials == 1  # type: ignore[union-attr]


def test_errors_are_told_from_accuracies():
    assert is_error("label_l1")
    assert is_error("label_l1_where_below_0.001")
    assert not is_error("label_l1_below_0.001")
    assert not is_error("insacc")
    assert not is_error("count_3")


def test_unknown_quantities_are_refused():
    check_quantity("count_3", "here")
    check_quantity("label_l1_where_below_1e-3", "here")
    with pytest.raises(ValueError, match="did you mean 'insacc'"):
        check_quantity("insac", "here")


def test_scores_above_a_bound_the_best_and_the_margin_over_nulls():
    one = replace(record(psnr=[10.0, 30.0, 20.0, None]), nulls={"mean": {"psnr": [5.0, 7.0]}, "foreign": {"psnr": [9.0, 9.0]}})
    assert figure_of("psnr_above_20", [one]).mean == 0.5  # type: ignore[union-attr]
    assert figure_of("psnr_best_2", [one]).mean == 25.0  # type: ignore[union-attr]
    assert figure_of("psnr_margin", [one]) is None  # a sample is missing
    whole = replace(one, metrics={"psnr": [10.0, 30.0]})
    assert figure_of("psnr_margin", [whole]).mean == pytest.approx(20.0 - 9.0)  # type: ignore[union-attr]


def test_of_targets_looks_at_the_target_samples_alone_and_counts_a_miss_as_zero():
    one = replace(record(psnr=[10.0, 50.0, math.nan, 30.0]), config={"subject": {"targets": [1, 2]}})
    assert figure_of("psnr_of_targets", [one]).mean == 25.0  # type: ignore[union-attr]
    assert figure_of("psnr_of_targets_above_40", [one]).mean == 0.5  # type: ignore[union-attr]
    check_quantity("psnr_of_targets_above_40", "here")
    check_quantity("calibration_error", "here")
    assert is_error("calibration_error")
    assert not is_error("determined_by_bins")
