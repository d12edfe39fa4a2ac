"""The share of each class, solved from the mean gradient of samples whose labels are known."""

import pytest
import torch
from torch import Tensor

import dosimeter as dm
from dosimeter.engines.counting.shares import class_shares, counts_of
from dosimeter.interfaces import Loss, Public
from dosimeter.network.head import Head
from dosimeter.types import Outcome

CLASSES, FEATURES = 5, 12
LABELS = torch.tensor([0, 0, 0, 1, 3, 3, 4, 4])
SHARES = torch.bincount(LABELS, minlength=CLASSES).double() / len(LABELS)


@pytest.fixture
def head(rng) -> Head:
    weight = torch.randn(CLASSES, FEATURES, generator=rng, dtype=torch.float64)
    bias = torch.randn(CLASSES, generator=rng, dtype=torch.float64)
    return Head(name="", weight=weight, bias=bias, weight_gradient=None, bias_gradient=None, non_negative=True)


def mean_gradient(loss: Loss, head: Head, features: Tensor) -> Tensor:
    return loss.logit_gradient(head.logits(features), LABELS).mean(0)


def public_of(loss: Loss, batch_size: int | None = len(LABELS)) -> Public:
    return Public(input_shape=(FEATURES,), classes=CLASSES, batch_size=batch_size, loss=loss, training=dm.FedSGD(), train_mode=False)


@pytest.mark.parametrize(
    "loss",
    [dm.CrossEntropy(), dm.CrossEntropy(smoothing=0.3, temperature=2.0), dm.BinaryCrossEntropy(), dm.Focal(gamma=0.0)],
    ids=str,
)
def test_shares_are_exact_where_the_servers_samples_are_the_clients(loss, head, rng):
    features = torch.rand(len(LABELS), FEATURES, generator=rng, dtype=torch.float64)
    found = class_shares(loss, head, features, mean_gradient(loss, head, features), "here")
    torch.testing.assert_close(found, SHARES, rtol=1e-9, atol=1e-9)


def test_under_focal_loss_they_are_exact_where_all_samples_are_alike(head, rng):
    loss = dm.Focal(gamma=2.0)
    features = torch.rand(1, FEATURES, generator=rng, dtype=torch.float64).expand(len(LABELS), -1)
    found = class_shares(loss, head, features, mean_gradient(loss, head, features), "here")
    torch.testing.assert_close(found, SHARES, rtol=1e-9, atol=1e-9)


def test_whole_counts_and_their_confidence():
    found = counts_of(SHARES, None, public_of(dm.CrossEntropy()), "here")
    assert found.counts.tolist() == [3, 1, 0, 2, 2]
    assert found.labels.tolist() == LABELS.tolist()
    assert found.confidence == pytest.approx(1.0)
    assert found.outcome is Outcome.COMPLETED
    assert found.scores.tolist() == pytest.approx([3, 1, 0, 2, 2])
    assert "several classes" in counts_of(SHARES, None, public_of(dm.BinaryCrossEntropy()), "here").message


def test_another_loss_is_refused(head):
    stranger = type("Stranger", (), {"name": "hinge"})()
    with pytest.raises(dm.Refused, match="not the client's hinge"):
        class_shares(stranger, head, torch.rand(2, FEATURES), torch.zeros(CLASSES), "here")
