"""From an exposure to its separation: the loss, the labels and the kind of targets, against a head with known features."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import dosimeter as dm
from dosimeter.engines.subspace.problem import separate_head
from dosimeter.network.head import find_head
from dosimeter.types import Refused

CLASSES, FEATURES = 100, 128


def exposed(targets: torch.Tensor, *, dtype: torch.dtype = torch.float64, **options):
    rng = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, CLASSES)).to(dtype).eval()
    features = torch.randn(len(targets), FEATURES, generator=rng, dtype=torch.float64).relu().clamp_max(1)
    return dm.observe(model, dm.Batch(features.to(dtype), targets), **options), features


def separated(exposure, labels=None, targets="any"):
    rng = torch.Generator().manual_seed(0)
    return separate_head(exposure, find_head(exposure), labels, rng, method="test", attempts=4, starts=8, targets=targets)


def nearest(found, features):
    distance = torch.cdist(found.features, features)
    assert float(distance.min(1).values.max()) < 1e-4
    return distance.argmin(1)


IDS = torch.tensor([3, 3, 11, 20])


@pytest.mark.parametrize(
    "loss",
    [
        dm.CrossEntropy(),
        dm.CrossEntropy(smoothing=0.1),
        dm.CrossEntropy(smoothing=0.1, convention="thesis"),
        dm.CrossEntropy(temperature=2.0),
    ],
)
def test_a_declared_loss_is_solved_as_it_is(loss):
    exposure, features = exposed(IDS, loss=loss)
    found = separated(exposure)
    assert found.complete
    which = nearest(found, features)
    assert torch.equal(found.labels, IDS[which])
    if loss.smoothing:
        torch.testing.assert_close(found.soft.double(), loss.smooth_targets(IDS, CLASSES, torch.float64)[which], rtol=0, atol=1e-6)


def test_undeclared_smoothing_is_found_with_its_strength():
    exposure, features = exposed((1 - 0.2) * one_hot(IDS, CLASSES).double() + 0.2 / CLASSES)
    found = separated(exposure, targets="smoothed")
    assert found.complete
    nearest(found, features)
    assert found.soft.amax(1).tolist() == pytest.approx([0.8 + 0.2 / CLASSES] * 4, abs=1e-6)


def test_blends_are_found_with_both_classes_and_their_shares():
    soft = 0.7 * one_hot(torch.tensor([3, 7, 11, 20]), CLASSES).double() + 0.3 * one_hot(torch.tensor([5, 8, 2, 29]), CLASSES)
    exposure, features = exposed(soft.float(), dtype=torch.float32)
    found = separated(exposure, targets="any")
    assert found.complete
    torch.testing.assert_close(found.soft, soft[nearest(found, features)], rtol=0, atol=1e-4)


def test_soft_labels_that_are_given_are_targets_as_they_are():
    soft = torch.softmax(torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 1)
    exposure, features = exposed(soft)
    found = dm.recover_features(exposure, "subspace", labels=soft)
    distance = torch.cdist(found.features, features)
    assert bool(found.certified.all())
    torch.testing.assert_close(found.soft, soft[distance.argmin(1)])


def test_soft_labels_must_sum_to_one():
    exposure, _ = exposed(IDS)
    estimate = dm.recover_labels(exposure, "subspace")
    broken = replace(estimate, soft=torch.full((4, CLASSES), 0.5))
    with pytest.raises(ValueError, match="sum to 1"):
        separated(exposure, broken, targets="declared")


def test_other_losses_are_refused():
    exposure, _ = exposed(IDS, loss=dm.BinaryCrossEntropy())
    with pytest.raises(Refused, match="cross-entropy"):
        separated(exposure)


def test_local_steps_certify_nothing():
    exposure, _ = exposed(IDS, training=dm.FedAvg(steps=2, learning_rate=0.1))
    assert not bool(separated(exposure).certified.any())
