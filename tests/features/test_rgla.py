"""RGLA: its objective vanishes at the truth, and descends towards it."""

import pytest
import torch

import dosimeter as dm
from dosimeter.features.rgla import RGLA, LogitProblem, _expected_loss
from dosimeter.network.head import find_head
from dosimeter.types import Refused

from .conftest import errors


def test_the_first_two_terms_vanish_at_the_true_logits(make):
    """Proposition 1 and Eq. (3), which hold exactly."""
    case = make(6, dtype=torch.float64)
    head = find_head(case.exposure)
    problem = LogitProblem.of(head, case.labels)
    logits = head.logits(case.features)
    method = RGLA(loss_term=0)
    assert float(method.objective(logits, problem)) < 1e-18
    assert float(method.objective(logits + torch.randn_like(logits), problem)) > 1e-3


def test_many_classes_have_the_same_objective_without_a_square_of_them(make, monkeypatch):
    case = make(6, dtype=torch.float64)
    head = find_head(case.exposure)
    logits = head.logits(case.features) + torch.randn(6, head.classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for most in (2048, 1):
        monkeypatch.setattr("dosimeter.features.rgla.MOST_SQUARED", most)
        problem = LogitProblem.of(head, case.labels)
        point = logits.clone().requires_grad_()
        value = RGLA().objective(point, problem)
        found.append((float(value), torch.autograd.grad(value, point)[0], problem.product is None))
    assert [without for *_, without in found] == [False, True]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    assert torch.allclose(found[1][1], found[0][1], rtol=1e-8, atol=1e-10)


def test_the_expected_loss_is_close_for_an_untrained_net(make):
    """Proposition 2."""
    case = make(8)
    loss = torch.nn.functional.cross_entropy(find_head(case.exposure).logits(case.features), case.labels)
    estimate = _expected_loss(find_head(case.exposure).bias_gradient, case.labels)
    assert abs(float(estimate - loss)) < 0.05


def test_the_expected_loss_drops_what_has_no_logarithm():
    value = _expected_loss(torch.tensor([-0.5, -0.75, 0.1]), torch.tensor([0, 1]))
    assert float(value) == 0.0  # 0.5 − 0.5 and 0.5 − 0.75: neither has a logarithm


@pytest.mark.parametrize("detached", [False, True])
def test_the_features_come_near(make, detached):
    case = make([1, 2, 2, 5], classes=20, features=64)
    options = {"steps": 3000, "learning_rate": 0.01, "initialisation": "zeros"}
    found = dm.recover_features(case.exposure, "rgla", labels=case.labels, detached=detached, **options)
    assert float(errors(found, case).median()) < 0.2
    assert torch.equal(found.labels, case.labels)
    assert not bool(found.certified.any())


def test_the_released_loop_follows_the_squared_loss_term_beside_plain_cross_entropy(make):
    """By hand: D is a constant of L_w, L_b has no slope, and the slopes of (loss − estimate)² and of the loss are added."""
    case = make(5, classes=8, features=16, dtype=torch.float64)
    head = find_head(case.exposure)
    problem = LogitProblem.of(head, case.labels)
    point = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(RGLA(form="released").objective(point, problem), point)
    logits = point.detach()
    error = (logits.softmax(1) - torch.nn.functional.one_hot(case.labels, 8)) / 5
    misfit = problem.product - error.T @ (logits - head.bias)
    loss = torch.nn.functional.cross_entropy(logits, case.labels)
    by_hand = -2e4 * error @ misfit + (2 * (loss - problem.expected_loss) + 1) * error
    assert torch.allclose(slope, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["normal", "uniform", "zeros", "ones", "natural", "fgla"])
def test_every_initialisation_starts_and_repeats(make, kind):
    auxiliary = dm.Batch(torch.rand(10, 64, generator=torch.Generator().manual_seed(4)), torch.arange(10))
    case = make([1, 3, 3], classes=10, features=32, auxiliary=auxiliary)
    first, again = (
        dm.recover_features(case.exposure, "rgla", labels=case.labels, steps=3, initialisation=kind, seed=5).features for _ in range(2)
    )
    assert torch.equal(first, again)
    assert bool(torch.isfinite(first).all())


def test_natural_images_must_be_granted_and_labels_given(make):
    case = make([1, 3], classes=10, features=32, train=False)
    with pytest.raises(Refused, match="auxiliary"):
        dm.recover_features(case.exposure, "rgla", labels=case.labels, steps=1, initialisation="natural")
    with pytest.raises(Refused, match="labels"):
        dm.recover_features(case.exposure, "rgla", steps=1)


def test_smoothed_losses_are_refused(make):
    case = make([1, 3], classes=10, features=32, train=False, loss=dm.CrossEntropy(smoothing=0.1))
    with pytest.raises(Refused, match="subspace allows"):
        dm.recover_features(case.exposure, "rgla", labels=case.labels, steps=1)
