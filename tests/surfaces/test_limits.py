"""Proved, shown and ceiling of a surface, from records."""

import dataclasses
import math

import pytest

from dosimeter.surfaces.limits import best_possible, limits_of
from dosimeter.surfaces.surface import surface_named
from dosimeter.types import Record

INPUTS, FEATURES = surface_named("inputs"), surface_named("features")


def record(psnr, *, method="dlg", verdict="not shown at this budget", details=None, seed=0, surface="inputs", metric="psnr"):
    return Record(
        key=method,
        config={"subject": {"batch_hash": "b"}},
        surface=surface,
        method=method,
        seed=seed,
        threat_model={},
        metrics={metric: psnr} if psnr else {},
        nulls={},
        outcome="completed",
        verdict=verdict,
        reason="",
        warnings=[],
        seconds=1.0,
        versions={},
        details=details or {},
    )


def ceiling(*values, proved=True):
    return {"ceiling": {"psnr": list(values), "bounds": {"psnr": {"bound": "van_trees", "proved": proved}}}}


def test_squared_errors_are_averaged_not_decibels():
    found = limits_of(INPUTS, [record([10.0, 20.0], details=ceiling(20.0, 20.0))])
    assert found.mean_shown == pytest.approx(-10 * math.log10((0.1 + 0.01) / 2))
    assert found.gap == pytest.approx(20 - found.mean_shown)
    assert not found.closed


def test_a_method_at_the_ceiling_closes_the_question_and_a_miss_leaves_it_open():
    assert limits_of(INPUTS, [record([19.5, 19.6], details=ceiling(20.0, 20.0))]).closed
    tokens = record([0.999], surface="tokens", metric="token_f1")
    assert not limits_of(surface_named("tokens"), [tokens]).closed, "without a bound only all of it is all of it"
    assert not limits_of(INPUTS, [record([19.5, None], details=ceiling(20.0, 20.0))]).closed


def test_a_proof_stands_for_its_sample_and_a_refuted_one_for_none():
    sure = record([40.0, 12.0], method="imprint", verdict="leaked", details={"proved_samples": [True, False]})
    found = limits_of(INPUTS, [record([9.0, 9.0], details=ceiling(50.0, 50.0)), sure])
    assert found.proved == [40.0, None]
    assert (found.method, found.shown, found.ceiling) == ("imprint", [40.0, 12.0], [50.0, 50.0])
    refuted = dataclasses.replace(sure, details=sure.details | {"false_certificates": 1})
    assert limits_of(INPUTS, [refuted]).proved == [None, None]


def test_what_is_proved_is_shown_too_where_another_method_showed_more_of_the_batch():
    best = record([30.0, 8.0, None], verdict="leaked", details=ceiling(50.0, 50.0, 50.0))
    other = record([5.0, 40.0, 41.0], method="imprint", details={"proved_samples": [True, True, True]})
    found = limits_of(INPUTS, [best, other])
    assert (found.method, found.proved, found.shown) == ("dlg", [5.0, 40.0, 41.0], [30.0, 40.0, 41.0])


def test_an_attack_that_does_not_run_still_has_its_ceiling_and_batches_follow_one_another():
    refused = record([], verdict="not attempted", details=ceiling(12.0, 13.0))
    found = limits_of(INPUTS, [refused, record([5.0, 6.0], seed=1, details=ceiling(14.0, 15.0))])
    assert found.ceiling == [12.0, 13.0, 14.0, 15.0]
    assert found.shown == [None, None, 5.0, 6.0]
    assert limits_of(INPUTS, [record([], verdict="not attempted")]) is None


def test_a_metric_ends_where_it_is_exact_and_a_psnr_has_no_end():
    assert (best_possible("insacc"), best_possible("feature_error"), best_possible("psnr")) == (1.0, 0.0, None)
    proved = record([1e-8], surface="features", metric="feature_error", verdict="leaked", details={"proved_samples": [True]})
    assert limits_of(FEATURES, [proved]).closed
    assert limits_of(FEATURES, [proved]).ceiling == [0.0]


def test_what_a_stranger_wrote_in_a_record_breaks_nothing():
    for held in ({"psnr": "high"}, {"psnr": [True, 3]}, {"bounds": []}, {"refused": 3}):
        limits_of(INPUTS, [record([9.0, 8.0], details={"ceiling": held, "proved_samples": "all"})])
