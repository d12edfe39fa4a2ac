"""Labels: scores of counts and of soft labels, the null of guessing, chance, the verdict and the share of a grid cell."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from scipy.stats import combine_pvalues
from torch import nn

import dosimeter as dm
from dosimeter.surfaces.labels import Labels, has_one_label, is_refuted, judge_labels
from dosimeter.surfaces.scores import Comparison
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Record


def estimate(labels, classes: int, soft=None) -> dm.LabelEstimate:
    labels = torch.tensor(labels)
    return dm.LabelEstimate(counts=torch.bincount(labels, minlength=classes), labels=labels, soft=soft)


def test_label_scores_by_hand():
    truth = dm.Batch(torch.zeros(8, 1), torch.tensor([2, 0, 0, 1, 0, 0, 2, 1]))  # counts 4, 2, 2
    scores = dm.score(estimate([0, 0, 0, 1, 1, 1, 2, 2], classes=4), truth)
    assert {name: float(value) for name, value in scores.items()} == pytest.approx(
        {"leacc": 1.0, "lnacc": 0.5, "clsacc": 1.0, "insacc": 7 / 9}
    )
    assert scores.assignment is None
    assert scores.misses == 0


def test_the_number_of_classes_widens_the_counts():
    truth = dm.Batch(torch.zeros(2, 1), torch.tensor([0, 1]))
    scores = dm.score(estimate([0, 0], classes=2), truth, classes=10)
    assert float(scores["leacc"]) == pytest.approx(0.9)
    assert float(scores["lnacc"]) == pytest.approx(0.8)
    assert float(scores["clsacc"]) == pytest.approx(0.5)


def test_the_prior_is_the_mean_over_labels_drawn_at_random():
    truth = dm.Batch(torch.zeros(2, 1), torch.tensor([0, 1]))
    scores = dm.score(estimate([0, 1], classes=4), truth)
    # of 16 ordered pairs: 2 are right (1), 10 share one label (1/3), 4 share none (0)
    assert float(scores.nulls["prior"]["insacc"]) == pytest.approx((2 + 10 / 3) / 16, abs=0.01)
    again = dm.score(estimate([0, 1], classes=4), truth)
    assert torch.equal(scores.nulls["prior"]["insacc"], again.nulls["prior"]["insacc"])


def test_the_prior_follows_the_auxiliary_labels_and_rules_out_no_class():
    truth = dm.Batch(torch.zeros(1, 1), torch.tensor([0]))
    auxiliary = dm.Batch(torch.zeros(16, 1), torch.tensor([0] * 14 + [1] * 2))
    null = dm.score(estimate([0], classes=4), truth, auxiliary=auxiliary).nulls["prior"]
    assert float(null["insacc"]) == pytest.approx(15 / 20, abs=0.02)
    without = dm.Batch(torch.zeros(16, 1), torch.tensor([1] * 16))
    assert 0.02 < float(dm.score(estimate([0], classes=4), truth, auxiliary=without).nulls["prior"]["insacc"]) < 0.08
    soft = dm.Batch(auxiliary.inputs, nn.functional.one_hot(auxiliary.targets, 4).double())
    same = dm.score(estimate([0], classes=4), truth, auxiliary=soft).nulls["prior"]
    assert float(same["insacc"]) == float(null["insacc"])


def test_chance_is_a_valid_probability_whatever_the_bias_of_the_method(rng):
    """Of estimates that know nothing, one that always says one class among them, at most a share p has chance ≤ p."""
    for guess in (lambda: [3, 3], lambda: torch.randint(0, 10, (2,), generator=rng).tolist(), lambda: [0, 1]):
        chances = []
        for _ in range(300):
            truth = dm.Batch(torch.zeros(2, 1), torch.randint(0, 10, (2,), generator=rng))
            chances.append(dm.score(estimate(guess(), classes=10), truth, metrics=["insacc"]).details["chance"])
        chances = torch.tensor(chances)
        for level in (0.015, 0.05, 0.25):
            assert float((chances <= level).double().mean()) <= level + 3 * (level / 300) ** 0.5


def test_how_labels_repeat_is_no_leak():
    """Of all estimates with these repeats only the classes tell: one class of ten by luck in a tenth, each class once always."""
    single = dm.Batch(torch.zeros(8, 1), torch.tensor([3] * 8))
    assert dm.score(estimate([3] * 8, classes=10), single).details["chance"] == pytest.approx(0.1, abs=0.01)
    every = dm.Batch(torch.zeros(10, 1), torch.arange(10))
    assert dm.score(estimate(list(range(10)), classes=10), every).details["chance"] == 1.0


def test_chance_by_hand():
    truth = dm.Batch(torch.zeros(2, 1), torch.tensor([3, 3]))
    details = dm.score(estimate([3, 3], classes=10), truth).details
    assert details["chance"] == pytest.approx(1 / 10, abs=0.01)  # renamed: one class of ten; drawn anew: one of 100 ordered pairs
    pair = dm.Batch(torch.zeros(2, 1), torch.tensor([3, 5]))
    assert dm.score(estimate([3, 5], classes=10), pair).details["chance"] == pytest.approx(1 / 45, abs=0.005)
    assert dm.score(estimate([1, 2], classes=10), truth).details["chance"] == 1.0


def test_soft_labels_are_matched_and_scored_by_sample():
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.1, 0.9]], dtype=torch.float64)
    soft = torch.tensor([[0.0, 0.2, 0.8], [0.7, 0.3, 0.0]], dtype=torch.float64)
    scores = dm.score(estimate([0, 2], classes=3, soft=soft), dm.Batch(torch.zeros(2, 1), targets))
    assert scores.assignment.tolist() == [1, 0]
    assert scores["label_l1"].tolist() == pytest.approx([0.0, 0.2])
    assert float(scores["insacc"]) == 1.0
    assert scores.nulls["prior"]["label_l1"].tolist() == pytest.approx([22 / 30, 34 / 30])
    hard = dm.score(estimate([0, 2], classes=3), dm.Batch(torch.zeros(2, 1), targets))
    assert hard["label_l1"].tolist() == pytest.approx([0.6, 0.2])


def test_a_foreign_label_estimate_is_a_null():
    truth = dm.Batch(torch.zeros(4, 1), torch.tensor([0, 0, 1, 3]))
    scores = dm.score(estimate([0, 0, 1, 3], classes=4), truth, foreign=estimate([2, 2, 2, 1], classes=4))
    assert float(scores.nulls["foreign"]["insacc"]) == pytest.approx(1 / 7)
    assert float(scores["insacc"]) == 1.0


def test_labels_leak_where_luck_does_not_explain_them():
    nulls = {"prior": {"insacc": [0.3]}}
    assert judge_labels({"insacc": [1.0]}, nulls, 0.001, False)[0] == Verdict.LEAKED
    verdict, reason = judge_labels({"insacc": [0.5]}, nulls, 0.001, True, refuted=True)
    assert verdict == Verdict.NOT_SHOWN
    assert "refuted by the truth" in reason
    assert judge_labels({"insacc": [1.0]}, nulls, 0.01, False, attempts=5)[0] == Verdict.LEAKED
    assert judge_labels({"insacc": [1.0]}, nulls, 0.01, False, attempts=6)[0] == Verdict.NOT_SHOWN
    verdict, reason = judge_labels({"insacc": [0.5]}, nulls, 0.2, False, attempts=3)
    assert verdict == Verdict.NOT_SHOWN
    assert reason.startswith(
        "50% of the labels recovered (InsAcc), guessing gives 30%; as much agreement comes by luck with probability 0.6"
    )
    assert "counting 3 methods tried" in reason
    assert judge_labels({"insacc": [1.0]}, nulls, 0.2, True)[0] == Verdict.LEAKED


def record(found, chance=None, prior=0.5, verdict=Verdict.NOT_SHOWN, method="ilrg", **details):
    return Record(
        key="k",
        config={},
        surface="labels",
        method=method,
        seed=0,
        threat_model={"batch_size": 4},
        metrics={"insacc": [found]},
        nulls={"prior": {"insacc": [prior]}},
        outcome="completed",
        verdict=verdict,
        reason="",
        warnings=[],
        seconds=1.0,
        versions={},
        details={"chance": chance, **details},
    )


@pytest.mark.parametrize(("found", "share"), [(1.0, 1.0), (0.6, 0.5), (0.2, 0.0), (0.1, 0.0)])
def test_the_share_counts_from_guessing_to_perfect(found, share):
    assert Labels().leaked_share([[record(found, prior=0.2, verdict=Verdict.LEAKED)]]) == pytest.approx(share)


@pytest.mark.parametrize("chances", [[0.2, 0.2, 0.2], [0.1, 0.1, 0.1], [0.04, 0.5, 0.9], [0.01], [0.2, 0.01]])
def test_batches_refute_luck_together_as_fishers_method_has_it(chances):
    refuted = combine_pvalues(chances, method="fisher").pvalue <= 0.05
    assert Labels().leaked_share([[record(1.0, chance) for chance in chances]]) == (1.0 if refuted else 0.0)


def test_luck_is_corrected_for_the_methods_tried_and_a_proof_needs_none():
    lucky = [record(0.75, 0.04)] * 2
    others = [[record(0.5, 1.0)] * 2] * 7
    assert Labels().leaked_share([lucky]) == 0.5
    assert Labels().leaked_share([lucky, *others]) == 0.0
    assert Labels().leaked_share([[record(0.75, 0.9, certified=True)], *others]) == 0.5


def test_batches_too_small_to_tell_say_so():
    doubt = "labels: ilrg came 100\u202f% of the way from guessing to perfect, which 4 samples are too few to tell from luck"
    assert Labels().doubt([[record(1.0, 0.2)]]) == doubt
    assert Labels().doubt([[record(0.5, 0.9)]]) == ""
    assert Labels().doubt([[record(1.0, 1e-9)]]) == ""
    assert Labels().doubt([]) == ""


def test_a_record_without_scores_shares_nothing():
    assert Labels().share(dataclasses.replace(record(1.0), metrics={}, nulls={})) == 0.0


def test_the_record_says_what_was_counted_and_the_report_says_how_sure(classifier, digits):
    batch = dm.Batch(digits.inputs[:3], digits.targets[:3])
    found = dataclasses.replace(estimate([0, 1, 1], 3), certified=True, confidence=0.5)
    details = Labels().details(found, dm.observe(classifier, batch), batch)
    assert details == {"counts": [1, 2, 0], "certified": True, "confidence": 0.5}
    assert Labels().facts(details) == ["certified: proved from the gradient alone", "the method’s own confidence 50.0\u202f%"]
    assert Labels().facts({"certified": False, "confidence": None}) == ["not certified"]


def test_a_certificate_that_the_truth_refutes_takes_the_verdict_away():
    truth = dm.Batch(torch.rand(3, 2), torch.tensor([0, 1, 1]))
    right = dm.LabelEstimate(counts=torch.tensor([1, 2, 0]), labels=torch.tensor([0, 1, 1]), certified=True)
    wrong = dataclasses.replace(right, counts=torch.tensor([1, 1, 1]), labels=torch.tensor([0, 1, 2]))
    for found, verdict in ((right, Verdict.LEAKED), (wrong, Verdict.NOT_SHOWN)):
        assert Labels().judge(found, dm.score(found, truth), 1)[0] == verdict


def certified(labels, classes=4, **fields):
    return replace(estimate(labels, classes=classes), certified=True, **fields)


def test_the_truth_refutes_false_counts_and_a_false_part_of_them():
    truth = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 3]]
    assert not is_refuted(certified([0, 0, 1, 3]), truth)
    assert is_refuted(certified([0, 1, 1, 3]), truth)
    assert not is_refuted(estimate([0, 1, 1, 3], classes=4), truth)
    for proved, refuted in (([1, 0, 0, 0], False), ([2, 1, 0, 1], False), ([0, 0, 1, 0], True), ([3, 0, 0, 0], True)):
        part = replace(estimate([0, 0, 0, 2], classes=4), details={"proved": torch.tensor(proved)})
        assert is_refuted(part, truth) == refuted


def test_the_truth_refutes_false_soft_labels():
    truth = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6]], dtype=torch.float64)
    assert not is_refuted(certified([0, 2], classes=3, soft=truth.flip(0)), truth)
    assert is_refuted(certified([0, 2], classes=3, soft=truth + torch.tensor([0.01, -0.01, 0.0])), truth)
    assert is_refuted(certified([0, 2], classes=3), truth)


def test_replaced_samples_refute_nothing():
    batch, mixup = dm.Batch(torch.rand(4, 8), torch.tensor([0, 0, 1, 3])), dm.defense("mixup")
    exposure = dm.observe(nn.Linear(8, 4), batch)
    for defenses, details in (((), 1), ((mixup,), None)):
        seen = replace(exposure, public=replace(exposure.public, defenses=defenses))
        assert dm.score(certified([2, 2, 2, 2]), batch, exposure=seen).details.get("false_certificates") == details


def test_several_labels_a_sample_are_counted_and_soft_ones_are_taken():
    found = dm.LabelEstimate(counts=torch.tensor([1, 1, 0]), labels=torch.tensor([0, 1]))
    inputs = torch.zeros(2, 1, 2, 2)
    scores = dm.score(found, dm.Batch(inputs, torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])))
    assert scores["insacc"][0] == pytest.approx(2 / 3)  # of three labels two are found, and none beside them
    with pytest.raises(dm.Refused, match="label vectors of zeros and ones; the targets of these samples sum to between"):
        dm.score(found, dm.Batch(inputs, torch.tensor([[0.3, 0.3, 0.0], [0.0, 0.9, 0.9]])))
    assert dm.score(found, dm.Batch(inputs, torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])))["insacc"][0] == 1
    assert has_one_label(torch.tensor([2, 0]))
    assert not has_one_label(torch.tensor([[1.0], [1.0]]))


def test_every_label_recovery_of_a_text_is_scored_without_a_crash():
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(torch.tanh(self.words(ids)).mean(1))

    torch.manual_seed(0)
    batch = dm.Batch(torch.randint(0, 50, (2, 6)), torch.tensor([1, 3]))
    report = dm.audit(Bag().eval(), batch, features=[], maps=[], tokens=[], attacks=[], ceilings=False, progress=None)
    assert [(record.method, record.reason) for record in report.records if record.outcome == "crashed"] == []
    (ilrg,) = (record for record in report.records if record.method == "ilrg")
    assert -1 <= ilrg.details["probability_cosine"] <= 1


def test_label_vectors_are_shown_sample_by_sample():
    truth = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]])
    found = dm.LabelEstimate(counts=torch.tensor([1, 1, 2]), labels=torch.tensor([1, 0]), soft=truth[[2, 0]])
    vectors, counted = Labels().evidence(found, Comparison(truth=dm.Batch(torch.zeros(3, 1), truth)))
    assert vectors.private == {"sample 1": "0, 2", "sample 2": "no label", "sample 3": "1, 2"}
    assert vectors.recovered == {"sample 1": "0, 2", "sample 2": "none", "sample 3": "1, 2"}
    assert counted.recovered == {"class 2": "2", "class 0": "1", "class 1": "1"}
    (alone,) = Labels().evidence(found, Comparison(truth=dm.Batch(torch.zeros(3, 1), torch.tensor([0, 2, 1]))))
    assert alone.caption == counted.caption
