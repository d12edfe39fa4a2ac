"""The verdict on a surface out of many records, and how records are ranked."""

import pytest

from dosimeter.surfaces.judging import gravity, judge_surfaces
from dosimeter.surfaces.verdicts import Verdict
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


def test_a_surface_without_an_attempt_says_what_each_method_lacks():
    refused = [record("labels", name, Verdict.NOT_ATTEMPTED, outcome="not attempted") for name in ("a", "b")]
    (verdict,) = judge_surfaces(refused)
    assert (verdict.verdict, verdict.method) == (Verdict.NOT_ATTEMPTED, "")
    assert verdict.reason == "none of 2 methods runs in this threat model: because of a; because of b"
    assert judge_surfaces(refused[:1])[0].reason == "because of a"


def test_only_a_theorem_makes_a_surface_impossible():
    proved = [record("labels", name, Verdict.IMPOSSIBLE, outcome="impossible", theorem="zero is zero") for name in ("a", "b")]
    (verdict,) = judge_surfaces(proved)
    assert (verdict.verdict, verdict.reason) == (Verdict.IMPOSSIBLE, "because of a; because of b")
    unproved = record("labels", "c", Verdict.IMPOSSIBLE, outcome="impossible")
    assert judge_surfaces([unproved])[0].verdict is Verdict.NOT_ATTEMPTED
    assert judge_surfaces([*proved, unproved])[0].verdict is Verdict.NOT_ATTEMPTED
    assert judge_surfaces([*proved, record("labels", "d", metrics={"insacc": [0.0]})])[0].verdict is Verdict.NOT_SHOWN


def test_a_surface_takes_its_gravest_record():
    shown = record(method="shown", verdict=Verdict.LEAKED, metrics={"psnr": [5.0]})
    louder = record(method="louder", metrics={"psnr": [9.0]})
    refused = record(surface="labels", method="refused", verdict=Verdict.IMPOSSIBLE, theorem="zero is zero")
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
    scored = record(surface, metrics={{"labels": "insacc", "features": "feature_error", "inputs": "psnr"}[surface]: [0.0]})
    assert gravity(record(surface))[2] < gravity(scored)[2]


def test_a_surface_without_a_leak_says_which_attacks_were_under_optimised():
    done = record(method="done", metrics={"psnr": [9.0]}, objective=1.0, objective_at_truth=2.0)
    short = record(method="short", metrics={"psnr": [5.0]}, objective=2.0, objective_at_truth=1.0)
    (verdict,) = judge_surfaces([done, short])
    assert (verdict.method, verdict.under_optimised) == ("done", True)
    assert verdict.reason == "because of done; short under-optimised, so more steps may show more"
    assert not judge_surfaces([done])[0].under_optimised
    leaked = record(method="leaked", verdict=Verdict.LEAKED, metrics={"psnr": [30.0]})
    assert not judge_surfaces([leaked, short])[0].under_optimised
