import math

import pytest

from dosimeter.surfaces.verdicts import Verdict, gravity, judge_features, judge_inputs, judge_labels, judge_surfaces
from dosimeter.types import Record


def record(surface="inputs", method="a", verdict=Verdict.NOT_SHOWN, outcome="completed", metrics=None, **details) -> Record:
    return Record(
        key=method,
        config={},
        surface=surface,
        method=method,
        seed=0,
        threat_model={},
        metrics=metrics or {},
        nulls={},
        outcome=outcome,
        verdict=verdict,
        reason=f"because of {method}",
        warnings=[],
        seconds=0.0,
        versions={},
        details=details,
    )


def test_labels_leak_where_luck_does_not_explain_them():
    nulls = {"prior": {"insacc": [0.3]}}
    assert judge_labels({"insacc": [1.0]}, nulls, 0.001, False)[0] == Verdict.LEAKED
    assert judge_labels({"insacc": [1.0]}, nulls, 0.01, False, attempts=5)[0] == Verdict.LEAKED
    assert judge_labels({"insacc": [1.0]}, nulls, 0.01, False, attempts=6)[0] == Verdict.NOT_SHOWN
    verdict, reason = judge_labels({"insacc": [0.5]}, nulls, 0.2, False, attempts=3)
    assert verdict == Verdict.NOT_SHOWN
    assert reason.startswith(
        "50% of the labels recovered (InsAcc), guessing gives 30%; as much agreement comes by luck with probability 0.6"
    )
    assert "counting 3 methods tried" in reason
    assert judge_labels({"insacc": [1.0]}, nulls, 0.2, True)[0] == Verdict.LEAKED


def test_inputs_leak_where_one_picture_beats_each_of_its_own_nulls():
    nulls = {"mean": {"psnr": [10.0, 10.0]}, "nearest": {"psnr": [20.0, 12.0]}}
    verdict, reason = judge_inputs({"psnr": [22.9, 15.0]}, nulls)
    assert verdict == Verdict.LEAKED
    assert reason.startswith("1 of 2 inputs beat every null by 3 dB or more")
    assert judge_inputs({"psnr": [22.9, 14.9]}, nulls)[0] == Verdict.NOT_SHOWN
    assert judge_inputs({"psnr": [None, math.nan]}, nulls)[0] == Verdict.NOT_SHOWN


def test_inputs_that_did_not_come_back_are_counted_and_not_averaged():
    verdict, reason = judge_inputs({"psnr": [30.0, math.nan, 28.0, None]}, {"mean": {"psnr": [12.0, 12.0, 14.0, 12.0]}})
    assert verdict is Verdict.LEAKED
    assert reason.endswith(
        "2 of 4 inputs beat every null by 3 dB or more; 2 came back, median PSNR 29.0 dB against 13.0 dB of each input's best null"
    )
    assert judge_inputs({"psnr": [math.nan] * 3}, {"mean": {"psnr": [12.0] * 3}}) == (Verdict.NOT_SHOWN, "none of 3 inputs came back")


def test_features_leak_by_certificate_or_by_half_of_the_best_null():
    nulls = {"mean": {"feature_error": [0.4, 0.4]}, "zero": {"feature_error": [1.0, 1.0]}}
    assert judge_features({"feature_error": [0.19, 0.19]}, nulls, 0)[0] == Verdict.LEAKED
    assert judge_features({"feature_error": [0.21, 0.21]}, nulls, 0)[0] == Verdict.NOT_SHOWN
    assert judge_features({"feature_error": [0.9, None]}, nulls, 1)[0] == Verdict.LEAKED
    assert judge_features({"feature_error": [0.001, 0.9]}, nulls, 2, refuted=1)[0] == Verdict.NOT_SHOWN


def test_an_impossible_surface_says_what_each_method_lacks():
    refused = [record("labels", name, Verdict.IMPOSSIBLE, outcome="impossible") for name in ("a", "b")]
    (verdict,) = judge_surfaces(refused)
    assert (verdict.verdict, verdict.method) == (Verdict.IMPOSSIBLE, "")
    assert verdict.reason == "none of 2 methods can run in this threat model: because of a; because of b"
    assert judge_surfaces(refused[:1])[0].reason == "because of a"


def test_a_surface_takes_its_gravest_record():
    shown = record(method="shown", verdict=Verdict.LEAKED, metrics={"psnr": [5.0]})
    louder = record(method="louder", metrics={"psnr": [9.0]})
    refused = record(surface="labels", method="refused", verdict=Verdict.IMPOSSIBLE)
    crashed = record(surface="features", method="crashed", outcome="crashed")
    verdicts = judge_surfaces([louder, shown, refused, crashed])
    assert [(v.surface, v.verdict, v.method) for v in verdicts] == [
        ("labels", Verdict.IMPOSSIBLE, "refused"),
        ("inputs", Verdict.LEAKED, "shown"),
    ]


def test_a_proof_outranks_a_higher_score():
    proved = record("labels", "proved", Verdict.LEAKED, metrics={"insacc": [0.9]}, certified=True)
    likely = record("labels", "likely", Verdict.LEAKED, metrics={"insacc": [1.0]})
    assert gravity(proved) > gravity(likely)
    assert judge_surfaces([likely, proved])[0].method == "proved"


def test_lower_errors_are_graver():
    near, far = (record("features", "x", Verdict.LEAKED, metrics={"feature_error": [error]}) for error in (0.01, 0.3))
    assert gravity(near) > gravity(far)


@pytest.mark.parametrize("surface", ["labels", "features", "inputs"])
def test_a_record_without_scores_ranks_last(surface):
    assert gravity(record(surface))[2] == -math.inf
