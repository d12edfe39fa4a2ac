"""Features: scores against the model's own, certificates that the truth refutes, the verdict and the share of a grid cell."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.probing import input_of
from dosimeter.surfaces.features import Features, false_certificates
from dosimeter.surfaces.verdicts import Verdict

TRUE_FEATURES = torch.eye(4)
TARGETS = torch.tensor([0, 1, 2, 3])


def first(batch: dm.Batch, count: int, start: int = 0) -> dm.Batch:
    return dm.Batch(batch.inputs[start : start + count], batch.targets[start : start + count])


@pytest.fixture
def seen(normed_classifier, digits):
    """A train-mode model with batch norm, its exposure and the true features."""
    truth = first(digits, 6)
    exposure = dm.observe(normed_classifier.train(), truth, auxiliary=first(digits, 60, 100))
    return exposure, truth, input_of(exposure.model, "4", truth.inputs)


def features_of(features, labels, **options) -> dm.FeatureEstimate:
    certified = options.pop("certified", torch.ones(len(features), dtype=torch.bool))
    return dm.FeatureEstimate(features=features, labels=labels, residual=torch.zeros(len(features)), certified=certified, **options)


def test_features_are_scored_against_what_the_model_really_computed(seen):
    exposure, truth, true = seen
    recovered = 1.005 * true.flip(0).double()
    scores = dm.score(features_of(recovered, truth.targets.flip(0)), truth, exposure=exposure)
    assert scores.assignment.tolist() == [5, 4, 3, 2, 1, 0]
    assert scores["feature_error"].tolist() == pytest.approx([0.005] * 6, rel=1e-3)
    assert scores["feature_cosine"].tolist() == pytest.approx([1.0] * 6)
    assert scores.details.pop("chance") < 1e-3
    assert scores.details == {"recovered": 6, "certified": 6, "false_certificates": 0}
    assert set(scores.nulls) == {"mean", "nearest"}
    assert bool((scores.nulls["nearest"]["feature_error"] > 0.1).all())


def test_the_mean_feature_null_runs_the_auxiliary_data_through_the_model(seen):
    exposure, truth, true = seen
    scores = dm.score(features_of(true, truth.targets), truth, exposure=exposure)
    mean = input_of(exposure.model, "4", exposure.auxiliary.inputs).mean(0)
    expected = (true - mean).norm(dim=1) / true.norm(dim=1)
    assert scores.nulls["mean"]["feature_error"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_without_auxiliary_data_the_null_is_the_zero_vector(classifier, digits):
    truth = first(digits, 3)
    exposure = dm.observe(classifier, truth)
    true = input_of(exposure.model, "5", truth.inputs)
    scores = dm.score(features_of(true, truth.targets), truth, exposure=exposure, foreign=features_of(2 * true, truth.targets))
    assert scores.nulls["zero"]["feature_error"].tolist() == [1.0] * 3
    assert scores.nulls["zero"]["feature_cosine"].tolist() == [0.0] * 3
    assert set(scores.nulls) == {"zero", "foreign"}


def test_false_certificates_are_counted(seen):
    exposure, truth, true = seen
    features, labels = true.clone(), truth.targets.clone()
    features[0] *= 1.5
    labels[1] = (labels[1] + 1) % 10
    features[2] *= 3
    certified = torch.tensor([True, True, False, True, True, True])
    details = dm.score(features_of(features, labels, certified=certified), truth, exposure=exposure).details
    assert {name: details[name] for name in ("recovered", "certified", "false_certificates")} == {
        "recovered": 6,
        "certified": 5,
        "false_certificates": 2,
    }


def test_fewer_features_are_misses_and_dropout_is_told(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)).train()
    truth = first(digits, 4)
    exposure = dm.observe(model, truth)
    scores = dm.score(features_of(torch.zeros(1, 16), truth.targets[:1]), truth, exposure=exposure)
    assert scores.misses == 3
    assert "drops units at random" in scores.warnings[0]


def test_what_cannot_be_compared_is_refused(digits, seen):
    exposure, truth, true = seen
    with pytest.raises(ValueError, match="scoring features needs the exposure"):
        dm.score(features_of(true, truth.targets), truth)
    with pytest.raises(ValueError, match=r"found.features: expected \(n, 256\)"):
        dm.score(features_of(true[:, :3], truth.targets), truth, exposure=exposure)


def test_foreign_features_are_merged_to_the_number_of_guesses():
    first, second = certified_features(), certified_features(torch.tensor([[torch.nan] * 4, [5.0] * 4]), TARGETS[:2])
    merged = Features().merge([first, second], 5)
    assert merged.features.tolist() == [*torch.eye(4).tolist(), [5.0] * 4]
    assert not merged.certified.any()
    assert [Features().count_guesses(estimate) for estimate in (first, second, merged)] == [4, 1, 5]


def test_features_are_judged_by_certificates_and_else_by_luck(seen, digits):
    exposure, truth, true = seen
    bare = features_of(true, truth.targets, certified=torch.zeros(6, dtype=torch.bool))
    other = features_of(input_of(exposure.model, "4", digits.inputs[40:46]), truth.targets)
    scores = dm.score(bare, truth, exposure=exposure, foreign=other)
    assert Features().judge(bare, scores, 1)[0] is Verdict.LEAKED
    lucky = replace(scores, details=scores.details | {"chance": 0.06})
    assert Features().judge(bare, lucky, 1)[0] is Verdict.NOT_SHOWN
    proved = features_of(true, truth.targets)
    verdict, reason = Features().judge(proved, dm.score(proved, truth, exposure=exposure), 9)
    assert verdict is Verdict.LEAKED
    assert reason.startswith("6 of 6 feature vectors certified")
    assert Features().beats_nulls(0.19, [0.4, 1.0])
    assert not Features().beats_nulls(0.2, [0.4, 1.0])


def test_the_record_says_what_the_gradient_can_determine(seen):
    exposure, truth, true = seen
    details = Features().details(features_of(true, truth.targets, batch_size=6), exposure, truth)
    (sentence,) = details.pop("identifiability")
    assert sentence == dm.identifiability(exposure).sentence
    assert details == {"certified": 6, "complete": False, "batch_size": 6}
    said = ["6 certified from the gradient alone", "batch size 6 read off the gradient", "a part of the gradient is not accounted for"]
    assert Features().facts(details) == said


def certified_features(features=TRUE_FEATURES, labels=TARGETS, certified=True, error_bar=None):
    return dm.FeatureEstimate(
        features=features,
        labels=labels,
        residual=torch.zeros(len(features)),
        certified=torch.as_tensor(certified).expand(len(features)),
        error_bar=error_bar,
    )


def refuted(found, targets=TARGETS, assignment=(0, 1, 2, 3)):
    return false_certificates(found, TRUE_FEATURES, targets, torch.tensor(assignment)).tolist()


def test_the_truth_itself_refutes_nothing():
    assert refuted(certified_features()) == [False] * 4
    assert refuted(certified_features(error_bar=torch.zeros(4))) == [False] * 4


def test_a_feature_past_one_percent_is_refuted_and_only_where_it_is_certified():
    features = TRUE_FEATURES + torch.tensor([0.0, 0.009, 0.011, 0.5])[:, None] * TRUE_FEATURES
    assert refuted(certified_features(features)) == [False, False, True, True]
    assert refuted(certified_features(features, certified=torch.tensor([True, True, True, False]))) == [False, False, True, False]


def test_an_error_past_its_own_bar_is_refuted_and_a_wide_bar_buys_nothing():
    features = TRUE_FEATURES + torch.tensor([1e-4, 1e-4, 0.5, 1e-7])[:, None] * TRUE_FEATURES
    assert refuted(certified_features(features, error_bar=torch.tensor([1e-3, 1e-5, 1.0, 0.0]))) == [False, True, True, False]
    assert refuted(certified_features(error_bar=torch.full((4,), torch.nan))) == [True] * 4


def test_wrong_labels_are_refuted_and_a_missing_one_claims_nothing():
    assert refuted(certified_features(labels=torch.tensor([0, 1, 3, -1]))) == [False, False, True, False]


def test_of_a_soft_target_any_largest_class_will_do():
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    assert refuted(certified_features(labels=torch.tensor([0, 1, 1, 5])), targets) == [False, False, True, True]


@pytest.mark.parametrize("assignment", [(0, 1, 2, -1)])
def test_a_certified_sample_without_a_partner_is_refuted(assignment):
    assert refuted(certified_features(), assignment=assignment) == [False, False, False, True]
