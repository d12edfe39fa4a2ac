import dataclasses

import pytest

from dosimeter.registry import METRICS
from dosimeter.runs.gate import caveat, furthest_trip, parse_condition
from dosimeter.surfaces.surface import surface_named, surface_names
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
        ("", "expected leaked, surface.leaked, surface.verdict == VERDICT, .*or surface.metric.statistic OP number"),
        ("inputs.psnr > 20", "expected leaked"),
        ("inputs.psnr.median = 20", "expected leaked"),
        ("inputs.psnr.median > twenty", "expected leaked"),
        ("inputs.psnr.median > 20 or 1", "expected leaked"),
        ("leaked > 1", "expected leaked"),
        ("inputs.psnr.median > ٣", "expected leaked"),
        ("inputs.psnr.median > ２０", "expected leaked"),
        ("inputs.psnr.max > 1e999", "expected a finite number"),
        ("pictures.leaked", "expected a surface out of labels, targets, features"),
        ("pictures.psnr.median > 20", "expected a surface out of labels, .*, utility, got 'pictures'"),
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


NOT_MEASURED = {"crashed": "not measured", "not attempted": "not attempted", "impossible": "impossible here"}  # without a theorem


def unmeasured(outcome, surface="inputs", method="dlg"):
    """The record of a method that gave nothing to score."""
    return dataclasses.replace(record(surface, method), outcome=outcome, verdict=NOT_MEASURED[outcome], reason=f"it {outcome}")


def shown(surface, verdict, **metrics):
    return dataclasses.replace(record(surface, "ilrg", **metrics), verdict=verdict, reason="so it is")


def test_a_metric_that_nothing_measured_is_no_pass():
    condition = parse_condition("inputs.psnr.median > 20")
    assert condition.why_untested([record("labels", "ilrg", insacc=[1.0])]) == "nothing that ran measures inputs.psnr"
    assert condition.why_untested([record(psnr=[1.0])]) is None
    assert condition.why_untested([record(psnr=[1.0]), unmeasured("crashed")]) is None
    for outcome in NOT_MEASURED:
        found = [unmeasured(outcome), record("labels", "ilrg", insacc=[1.0])]
        assert condition.why_untested(found) == f"nothing that ran measures inputs.psnr (dlg: it {outcome})"
        assert condition.failure(found) is None


def test_a_metric_without_weights_is_no_pass():
    weightless = dataclasses.replace(record(psnr=[30.0]), details={"unavailable": {"lpips": "no weights"}})
    why = parse_condition("inputs.lpips.median < 0.1").why_untested([weightless])
    assert why == "nothing that ran measures inputs.lpips (dlg: no weights)"


def test_leaked_is_the_verdict_of_any_surface_or_of_one():
    records = [shown("labels", "leaked", insacc=[1.0]), shown("inputs", "not shown at this budget", psnr=[8.0])]
    assert parse_condition("leaked").failure(records) == "failed on leaked: labels leaked (ilrg): so it is"
    assert parse_condition(" labels.leaked ").failure(records) == "failed on labels.leaked: labels leaked (ilrg): so it is"
    assert parse_condition("inputs.leaked").failure(records) is None
    assert parse_condition("inputs.leaked").why_untested(records) is None
    assert parse_condition("leaked").failure(records[1:]) is None


@pytest.mark.parametrize("outcome", NOT_MEASURED)
def test_leaked_needs_a_method_that_ran(outcome):
    alone = [unmeasured(outcome)]
    for text in ("leaked", "inputs.leaked"):
        assert parse_condition(text).failure(alone) is None
        assert parse_condition(text).why_untested(alone) == f"nothing that ran measures inputs (dlg: it {outcome})"
    assert parse_condition("labels.leaked").why_untested(alone) == "nothing that ran measures labels"
    beside = [*alone, shown("labels", "not shown at this budget", insacc=[0.1])]
    assert parse_condition("labels.leaked").why_untested(beside) is None
    assert parse_condition("leaked").why_untested(beside) == f"nothing that ran measures inputs (dlg: it {outcome})"
    assert parse_condition("leaked").why_untested([]) == "nothing that ran measures anything"


def test_a_theorem_is_an_answer():
    proved = dataclasses.replace(unmeasured("impossible"), details={"theorem": "zero is zero"})
    for text in ("inputs.psnr.median > 20", "inputs.leaked", "leaked"):
        assert parse_condition(text).why_untested([proved, unmeasured("not attempted")]) is None
        assert parse_condition(text).failure([proved]) is None
    cost = dataclasses.replace(record("utility"), verdict="")
    assert parse_condition("utility.accuracy.median < 0.8").why_untested([cost]) == "nothing that ran measures utility.accuracy (dlg: )"


@pytest.mark.parametrize("surface", surface_names())
def test_a_refuted_certificate_is_no_pass_on_any_surface(surface):
    metric = surface_named(surface).headline
    found = dataclasses.replace(shown(surface, "not shown at this budget", **{metric: [0.5]}), details={"false_certificates": 1})
    said = f"the truth refutes what ilrg ({surface}) claims to have proved: do not trust this run, and report it"
    never = f"{surface}.{metric}.median " + ("> 1e9" if METRICS.build(metric).higher_is_better else "< -1e9")
    for text in ("leaked", f"{surface}.leaked", never):
        condition = parse_condition(text)
        assert condition.failure([found]) is None
        assert condition.why_untested([found]) == said
        assert condition.why_untested([dataclasses.replace(found, details={"false_certificates": 0})]) != said
    other = next(name for name in surface_names() if name != surface)
    assert parse_condition(f"{other}.leaked").why_untested([found, shown(other, "not shown at this budget")]) is None


def test_a_pass_of_under_optimised_attacks_is_said_to_be_one():
    details = {"objective": 2.0, "objective_at_truth": 1.0}
    short = dataclasses.replace(record(psnr=[10.0]), verdict="not shown at this budget", details=details)
    for text in ("inputs.psnr.median > 20", "inputs.leaked", "leaked"):
        said = caveat(parse_condition(text), [short, dataclasses.replace(short, method="sapag", details={})])
        assert said == f"not failed on {text}, but dlg under-optimised: more steps may show more"
    assert caveat(parse_condition("inputs.psnr.median > 5"), [short]) == ""
    assert caveat(parse_condition("labels.insacc.median > 0.5"), [short]) == ""
    assert caveat(parse_condition("inputs.lpips.median < 0.5"), [short]) == ""  # nothing measured it: that is said instead


VERDICT = "not shown at this budget"


@pytest.mark.parametrize(
    ("text", "verdict", "fails"),
    [
        ("inputs.verdict == leaked", "leaked", True),
        ("inputs.verdict==leaked", VERDICT, False),
        ("inputs.verdict == 'not shown'", VERDICT, True),
        (f'inputs.verdict == "{VERDICT}"', VERDICT, True),
        ("inputs.verdict != impossible", "leaked", True),
        ("inputs.verdict != impossible", "not attempted", True),
        ("inputs.verdict == not attempted", "not attempted", True),
        ("inputs.verdict == not attempted", "leaked", False),
    ],
)
def test_a_verdict_is_a_condition(text, verdict, fails):
    found = dataclasses.replace(record(psnr=[9.0]), verdict=verdict, reason="so it is")
    condition = parse_condition(text)
    assert (condition.failure([found]) is not None) is fails
    assert condition.why_untested([found]) is None
    assert parse_condition(str(condition)) == condition


def test_what_is_proved_without_the_private_samples_has_leaked():
    proved = [dataclasses.replace(BLANK, surface="labels", verdict="proved", reason="r", details={"certified": True})]
    for text, fails in (("leaked", True), ("== proved", True), ("!= leaked", False), ("== not shown", False)):
        condition = parse_condition(text if text == "leaked" else f"labels.verdict {text}")
        assert (condition.failure(proved) is not None) is fails, text
    condition = parse_condition("labels.verdict == leaked")
    assert condition.failure(proved) == "failed on labels.verdict == leaked: labels proved: r"
    unverified = [dataclasses.replace(BLANK, verdict="unverified", reason="no truth")]
    assert parse_condition("inputs.verdict == leaked").why_untested(unverified)


def test_a_method_that_was_scored_says_first_why_the_metric_is_missing():
    refused = [dataclasses.replace(BLANK, method=f"m{i}", outcome="not attempted", reason="no room") for i in range(4)]
    scored = dataclasses.replace(record(psnr=[9.0]), details={"unavailable": {"lpips": "needs weights"}})
    said = parse_condition("inputs.lpips.median < 0.2").why_untested([*refused, scored])
    assert said is not None
    assert said.startswith("nothing that ran measures inputs.lpips (dlg: needs weights; m0: no room")


def test_a_verdict_that_rests_on_nothing_is_no_pass():
    none_ran = [dataclasses.replace(BLANK, verdict="not attempted", outcome="not attempted", reason="no bias")]
    condition = parse_condition("inputs.verdict == leaked")
    assert condition.failure(none_ran) is None
    assert condition.why_untested(none_ran) == "nothing that ran measures inputs (no bias)"
    assert parse_condition("labels.verdict == leaked").why_untested(none_ran) == "nothing that ran measures labels"
    crashed = [dataclasses.replace(BLANK, verdict="not measured", outcome="crashed", reason="crashed with OSError")]
    assert "crashed" in condition.why_untested(crashed)
    assert "failed" in parse_condition("inputs.verdict == not measured").failure(crashed)


@pytest.mark.parametrize(
    "text", ["inputs.verdict == safe", "inputs.verdict > leaked", "pictures.verdict == leaked", "inputs.verdict = leaked"]
)
def test_a_verdict_that_does_not_exist_is_refused(text):
    with pytest.raises(ValueError, match="--fail-on: expected"):
        parse_condition(text)


def test_a_pass_on_an_estimated_ceiling_says_so():
    def bounded(proved):
        bounds = {"psnr": {"bound": "van_trees", "proved": proved}}
        return [dataclasses.replace(record(psnr=[9.0]), details={"ceiling": {"psnr": [12.0], "bounds": bounds}})]

    condition = parse_condition("inputs.ceiling.psnr > 20")
    assert caveat(condition, bounded(True)) == ""
    assert "the ceiling of van_trees is an estimate" in caveat(condition, bounded(False))
    assert caveat(parse_condition("inputs.ceiling.psnr > 10"), bounded(False)) == ""


def test_a_ceiling_is_a_condition_and_untested_where_no_record_has_one():
    condition = parse_condition("inputs.ceiling.psnr > 20")
    assert str(condition) == "inputs.ceiling.psnr > 20"
    assert condition.failure([record(psnr=[30.0])]) is None
    assert condition.why_untested([record(psnr=[30.0])]).startswith("nothing that ran measures inputs.ceiling.psnr")
    bounded = dataclasses.replace(record(psnr=[9.0]), details={"ceiling": {"psnr": [12.0, 24.0]}})
    assert "the ceiling is 24" in condition.failure([bounded])
    assert condition.why_untested([bounded]) is None
    assert parse_condition("inputs.ceiling.psnr > 25").failure([bounded]) is None
    unlimited = dataclasses.replace(bounded, details={"ceiling": {"psnr": [12.0, None], "refused": {"van_trees": "too long"}}})
    assert parse_condition("inputs.ceiling.psnr > 25").why_untested([unlimited]).endswith("(van_trees: too long)")
    picked = dataclasses.replace(bounded, details={"ceiling": {"identified": [0.3, 0.2]}})
    assert "the ceiling is 0.3" in parse_condition("inputs.ceiling.identified > 0.25").failure([picked])
    with pytest.raises(ValueError, match="expected a metric of inputs"):
        parse_condition("inputs.ceiling.insacc > 20")
