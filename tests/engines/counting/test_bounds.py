"""Least counts beyond signs: auxiliary probabilities, elimination, and samples taken off."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.bounds import Bounds, _by_auxiliary, _by_elimination, bounds
from dosimeter.engines.counting.counts import least_counts
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head, find_head

CLASSES, FEATURES = 150, 200


def head_of(probabilities: Tensor, labels: Tensor, features: Tensor) -> Head:
    """A head with the gradient that these probabilities would give."""
    errors = (probabilities - one_hot(labels, probabilities.shape[1])) / len(labels)
    classes, size = probabilities.shape[1], features.shape[1]
    zeros = torch.zeros(classes, size, dtype=torch.float64)
    return Head(
        name="", weight=zeros, bias=zeros[:, 0], weight_gradient=errors.T @ features, bias_gradient=errors.sum(0), non_negative=True
    )


@pytest.mark.parametrize("seed", range(5))
def test_elimination_finds_the_labels_that_other_samples_hide(seed):
    """Three samples are predicted so well that what others give their classes outweighs them in every entry of their rows."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randperm(CLASSES, generator=rng)[:20]
    own = torch.full((20,), 0.3, dtype=torch.float64)
    own[:3] = torch.tensor([1 - 1e-3, 1 - 1e-4, 1 - 1e-5])
    others = torch.rand(20, CLASSES, generator=rng, dtype=torch.float64) ** 4
    others = others.scatter(1, labels[:, None], 0)
    probabilities = (1 - own)[:, None] * others / others.sum(1, keepdim=True) + own[:, None] * one_hot(labels, CLASSES)
    features = torch.rand(20, FEATURES, generator=rng, dtype=torch.float64) + 0.5
    head = head_of(probabilities, labels, features)
    least = least_counts(head, 20, CrossEntropy())
    hidden = set(labels[least[labels] == 0].tolist())
    assert hidden
    assert hidden <= set(labels[:3].tolist())
    assert torch.equal(
        _by_elimination(head, least, 20, probabilities.sum(0) - one_hot(labels, CLASSES).sum(0)),
        torch.bincount(labels, minlength=CLASSES).double(),
    )


def test_elimination_says_nothing_where_a_class_occurs_twice():
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 1, 2])
    probabilities = torch.rand(4, 30, generator=rng, dtype=torch.float64).softmax(1)
    head = head_of(probabilities, labels, torch.rand(4, 40, generator=rng, dtype=torch.float64))
    seen = torch.zeros(30, dtype=torch.float64).index_fill(0, torch.tensor([0, 1, 2]), 1)
    assert torch.equal(_by_elimination(head, seen, 4, probabilities.sum(0) - one_hot(labels, 30).sum(0)), seen)


def test_auxiliary_probabilities_bound_the_counts_where_they_do_not_vary():
    labels = torch.tensor([0] * 9 + [1] * 2 + [2])
    p = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64)
    features = torch.ones(12, 1, dtype=torch.float64)
    head = head_of(p.expand(12, 4), labels, features)
    uneven = Head(
        name="",
        weight=p.log()[:, None],
        bias=None,
        weight_gradient=head.weight_gradient,
        bias_gradient=head.bias_gradient,
        non_negative=True,
    )
    assert least_counts(uneven, 12, CrossEntropy()).tolist() == [3, 0, 0, 0]
    assert _by_auxiliary(uneven, features, 12, 1.0).tolist() == [9, 2, 1, 0]


def test_bounds_that_ask_for_too_many_samples_are_dropped_and_others_are_not_proofs():
    known = Bounds(least=torch.tensor([1.0, 0.0]), proved=True)
    assert known.sharpen(torch.tensor([0.0, 3.0]), 3) is known
    assert known.sharpen(torch.tensor([1.0, 0.0]), 3) is known
    sharper = known.sharpen(torch.tensor([0.0, 2.0]), 3)
    assert sharper.least.tolist() == [1, 2]
    assert not sharper.proved
    assert sharper.leave(4) == 1


def sure_exposure(seed: int, labels: Tensor) -> tuple[Exposure, Tensor]:
    torch.manual_seed(seed)
    layer = nn.Linear(FEATURES, CLASSES)
    weight = 6 * torch.randn(CLASSES, FEATURES)
    layer.weight.data = weight - weight.mean(1, keepdim=True)  # what features have in common decides nothing
    features = torch.rand(len(labels), FEATURES)
    return dm.observe(nn.Sequential(nn.ReLU(), layer).eval(), dm.Batch(features, labels)), features


@pytest.mark.parametrize("seed", range(5))
def test_taking_the_gradient_apart_counts_what_a_sure_head_hides(seed):
    """The surest sample is taken for a class of which there are three others: n - Σ p hides one of them."""
    exposure, features = sure_exposure(seed, torch.zeros(10, dtype=torch.long))
    top = exposure.model(features).softmax(1).max(1)
    surest = top.indices[3 + top.values[3:].argmax()]
    labels = torch.cat([surest.expand(3), (surest + 1 + torch.arange(7)) % CLASSES])
    exposure, _ = sure_exposure(seed, labels)
    head, truth = find_head(exposure), torch.bincount(labels, minlength=CLASSES).double()
    assert int(least_counts(head, 10, CrossEntropy()).sum()) < 10
    found = bounds(exposure, head, features[:5].double(), torch.Generator(), method="test")
    assert torch.equal(found.least, truth)
    assert not found.proved
