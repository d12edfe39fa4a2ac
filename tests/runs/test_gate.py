import dataclasses

import pytest

from dosimeter.runs.gate import furthest_trip, is_untested, parse_condition
from dosimeter.types import Record

BLANK = Record(
    key="k",
    config={},
    surface="inputs",
    method="dlg",
    seed=0,
    threat_model={"defenses": []},
    metrics={},
    nulls={},
    outcome="completed",
    verdict="leaked",
    reason="",
    warnings=[],
    seconds=1.0,
    versions={},
)


def record(surface="inputs", method="dlg", **metrics):
    return dataclasses.replace(BLANK, surface=surface, method=method, metrics=metrics)


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        ("inputs.psnr.median > 20", True),
        ("inputs.psnr.median > 21", False),
        ("inputs.psnr.median >= 21", True),
        ("inputs.psnr.max>29.5", True),
        ("inputs.psnr.min < 1.05e1", True),
        ("inputs.psnr.min < 10", False),
        ("inputs.ssim.max > 0", False),
        ("labels.insacc.median > .5", False),
    ],
)
def test_statistics_and_comparisons(text, trips):
    assert (furthest_trip(parse_condition(text), [record(psnr=[10.0, 21.0, 30.0])]) is not None) is trips


def test_a_miss_is_the_worst_score():
    missed = [record(psnr=[None, None, 30.0])]
    assert furthest_trip(parse_condition("inputs.psnr.median > 5"), missed) is None
    assert furthest_trip(parse_condition("inputs.psnr.min > 5"), missed) is None
    assert furthest_trip(parse_condition("inputs.psnr.max > 5"), missed).value == 30.0
    errors = [record("features", feature_error=[None, 0.1])]
    assert furthest_trip(parse_condition("features.feature_error.max < 1"), errors) is None
    assert furthest_trip(parse_condition("features.feature_error.min < 1"), errors).value == 0.1


def test_the_sentence_names_the_worst_method_and_its_defenses():
    defended = dataclasses.replace(record(method="sapag", psnr=[40.0]), threat_model={"defenses": [{"name": "pruning", "ratio": 0.9}]})
    trip = furthest_trip(parse_condition("inputs.psnr.median > 20"), [record(psnr=[25.0]), defended])
    assert str(trip) == "failed on inputs.psnr.median > 20: sapag gave 40 (behind pruning)"


def test_costs_can_be_gated_too():
    cost = record("utility", "federated training", accuracy=[0.7], epsilon=[None])
    assert furthest_trip(parse_condition("utility.accuracy.median < 0.8"), [cost]).value == 0.7
    assert furthest_trip(parse_condition("utility.epsilon.median > 8"), [cost]) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected surface.metric.statistic OP number"),
        ("inputs.psnr > 20", "expected surface.metric.statistic OP number"),
        ("inputs.psnr.median = 20", "expected surface.metric.statistic OP number"),
        ("inputs.psnr.median > twenty", "expected surface.metric.statistic OP number"),
        ("inputs.psnr.median > 20 or 1", "expected surface.metric.statistic OP number"),
        ("pictures.psnr.median > 20", "expected a surface out of labels, features, inputs, utility, got 'pictures'"),
        ("inputs.insacc.median > 20", "expected a metric of inputs out of"),
        ("utility.psnr.median > 20", "expected a metric of utility out of accuracy"),
        ("inputs.psnr.p99 > 20", "expected a statistic out of median, min, max, got 'p99'"),
    ],
)
def test_bad_grammar_is_refused(text, problem):
    with pytest.raises(ValueError, match=f"--fail-on: {problem}"):
        parse_condition(text)


def test_a_defense_that_promises_nothing_has_no_finite_epsilon():
    costs = record("utility", "", epsilon=[None])
    assert furthest_trip(parse_condition("utility.epsilon.max > 1"), [costs]) is None  # nothing was to promise anything
    defended = dataclasses.replace(costs, threat_model={"defenses": [{"name": "gaussian_noise"}]})
    assert furthest_trip(parse_condition("utility.epsilon.max > 1"), [defended]) is not None


def test_a_surface_that_nothing_measured_is_no_pass():
    condition = parse_condition("inputs.psnr.median > 20")
    assert is_untested(condition, [record("labels", "ilrg", insacc=[1.0])])
    assert not is_untested(condition, [record(psnr=[1.0])])


def test_what_was_not_attempted_is_no_pass_and_a_theorem_is_one():
    condition = parse_condition("inputs.psnr.median > 20")
    refused = dataclasses.replace(record(), outcome="not attempted", verdict="not attempted")
    assert is_untested(condition, [refused])
    assert is_untested(condition, [dataclasses.replace(refused, outcome="impossible", verdict="impossible here")])
    proved = dataclasses.replace(refused, outcome="impossible", verdict="impossible here", details={"theorem": "zero is zero"})
    assert not is_untested(condition, [proved])
    assert is_untested(parse_condition("utility.accuracy.median < 0.8"), [dataclasses.replace(record("utility"), verdict="")])
