"""False certificates: what makes one, and what does not."""

import pytest
import torch

from dosimeter.surfaces.certificates import false_certificates
from dosimeter.types import FeatureEstimate

FEATURES = torch.eye(4)
TARGETS = torch.tensor([0, 1, 2, 3])


def estimate(features=FEATURES, labels=TARGETS, certified=True, error_bar=None):
    return FeatureEstimate(
        features=features,
        labels=labels,
        residual=torch.zeros(len(features)),
        certified=torch.as_tensor(certified).expand(len(features)),
        error_bar=error_bar,
    )


def refuted(found, targets=TARGETS, assignment=(0, 1, 2, 3)):
    return false_certificates(found, FEATURES, targets, torch.tensor(assignment)).tolist()


def test_the_truth_itself_refutes_nothing():
    assert refuted(estimate()) == [False] * 4
    assert refuted(estimate(error_bar=torch.zeros(4))) == [False] * 4


def test_a_feature_past_one_percent_is_refuted_and_only_where_it_is_certified():
    features = FEATURES + torch.tensor([0.0, 0.009, 0.011, 0.5])[:, None] * FEATURES
    assert refuted(estimate(features)) == [False, False, True, True]
    assert refuted(estimate(features, certified=torch.tensor([True, True, True, False]))) == [False, False, True, False]


def test_an_error_past_its_own_bar_is_refuted_and_a_wide_bar_buys_nothing():
    features = FEATURES + torch.tensor([1e-4, 1e-4, 0.5, 1e-7])[:, None] * FEATURES
    assert refuted(estimate(features, error_bar=torch.tensor([1e-3, 1e-5, 1.0, 0.0]))) == [False, True, True, False]
    assert refuted(estimate(error_bar=torch.full((4,), torch.nan))) == [True] * 4


def test_wrong_and_unknown_labels_are_refuted():
    assert refuted(estimate(labels=torch.tensor([0, 1, 3, -1]))) == [False, False, True, True]


def test_of_a_soft_target_any_largest_class_will_do():
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    assert refuted(estimate(labels=torch.tensor([0, 1, 1, 5])), targets) == [False, False, True, True]


@pytest.mark.parametrize("assignment", [(0, 1, 2, -1)])
def test_a_certified_sample_without_a_partner_is_refuted(assignment):
    assert refuted(estimate(), assignment=assignment) == [False, False, False, True]
