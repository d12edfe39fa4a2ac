import pytest
import torch
from torch import nn
from torch.nn import functional

import dosimeter as dm
from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, Focal
from dosimeter.options import OptionError

LOSSES = [
    CrossEntropy(),
    CrossEntropy(temperature=0.8),
    CrossEntropy(smoothing=0.25),
    CrossEntropy(smoothing=0.1, convention="thesis", temperature=1.2),
    Focal(gamma=2.0),
    Focal(gamma=0.5, alpha=0.25, temperature=1.5),
    Focal(gamma=2.0, alpha=(0.2, 0.5, 1.0, 2.0, 4.0)),
    BinaryCrossEntropy(),
    BinaryCrossEntropy(over_classes="sum"),
]


@pytest.fixture
def logits(rng):
    return 3 * torch.randn(6, 5, generator=rng, dtype=torch.float64)


@pytest.fixture(params=["ids", "soft"])
def targets(request, rng):
    if request.param == "ids":
        return torch.tensor([0, 1, 2, 2, 4, 0])
    return torch.softmax(torch.randn(6, 5, generator=rng, dtype=torch.float64), 1)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_closed_form_gradient_is_autograds(loss, logits, targets):
    logits.requires_grad_()
    (wanted,) = torch.autograd.grad(loss.per_sample(logits, targets).sum(), logits)
    torch.testing.assert_close(loss.logit_gradient(logits, targets), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_value_is_the_mean_over_samples(loss, logits, targets):
    torch.testing.assert_close(loss(logits, targets), loss.per_sample(logits, targets).mean())


def test_cross_entropy_is_pytorchs(logits, targets):
    for smoothing in (0.0, 0.3):
        torch.testing.assert_close(
            CrossEntropy(smoothing=smoothing)(logits, targets), functional.cross_entropy(logits, targets, label_smoothing=smoothing)
        )


def test_binary_cross_entropy_is_pytorchs(logits):
    ids = torch.tensor([0, 1, 2, 2, 4, 0])
    wanted = functional.binary_cross_entropy_with_logits(logits, functional.one_hot(ids, 5).double())
    torch.testing.assert_close(BinaryCrossEntropy()(logits, ids), wanted)


def test_one_logit_answers_yes_or_no():
    logits, answers = torch.tensor([[0.3], [-2.0]]), torch.tensor([1, 0])
    wanted = functional.binary_cross_entropy_with_logits(logits[:, 0], answers.float())
    torch.testing.assert_close(BinaryCrossEntropy()(logits, answers), wanted)


def test_the_two_smoothing_conventions():
    ids = torch.tensor([1])
    torch.testing.assert_close(
        CrossEntropy(smoothing=0.2).smooth_targets(ids, 5, torch.float64),
        torch.tensor([[0.04, 0.84, 0.04, 0.04, 0.04]], dtype=torch.float64),
    )
    torch.testing.assert_close(
        CrossEntropy(smoothing=0.2, convention="thesis").smooth_targets(ids, 5, torch.float64),
        torch.tensor([[0.05, 0.8, 0.05, 0.05, 0.05]], dtype=torch.float64),
    )


def test_focal_without_focus_is_cross_entropy(logits, targets):
    torch.testing.assert_close(Focal(gamma=0.0).per_sample(logits, targets), CrossEntropy().per_sample(logits, targets))


def test_focal_loss_without_focus_weighs_classes_as_pytorch_does(logits):
    ids, weights = torch.tensor([0, 1, 2, 2, 4, 0]), (0.2, 0.5, 1.0, 2.0, 4.0)
    wanted = functional.cross_entropy(logits, ids, weight=torch.tensor(weights, dtype=torch.float64), reduction="none")
    torch.testing.assert_close(Focal(gamma=0.0, alpha=weights).per_sample(logits, ids), wanted)
    with pytest.raises(ValueError, match=r"loss\.alpha: expected one number, or one for each of 5 classes, got 2"):
        Focal(alpha=(1.0, 2.0)).per_sample(logits, ids)


def test_focal_weight_stays_finite_where_the_model_is_certain():
    logits = torch.tensor([[200.0, 0.0, 0.0]])
    assert torch.isfinite(Focal().logit_gradient(logits, torch.tensor([0]))).all()
    assert torch.isfinite(Focal().logit_gradient(logits, torch.tensor([1]))).all()


def test_refusals_name_the_option():
    with pytest.raises(OptionError, match="temperature: expected a positive number"):
        CrossEntropy(temperature=0)
    with pytest.raises(OptionError, match=r"smoothing: expected a number in \[0, 1\]"):
        CrossEntropy(smoothing=1.5)


def test_targets_of_an_own_loss_may_have_another_shape_than_the_outputs():
    """A class and a box: five numbers beside fourteen outputs."""

    def box_loss(outputs, targets):
        return nn.functional.cross_entropy(outputs[:, :10], targets[:, 0].long()) + (outputs[:, 10:] - targets[:, 1:]).abs().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 14))
    batch = dm.Batch(torch.rand(2, 1, 4, 4), torch.tensor([[3, 0.1, 0.2, 0.3, 0.4], [7, 0.5, 0.6, 0.7, 0.8]]))
    exposure = dm.observe(model, batch, loss=box_loss)
    for labels in (None, batch.targets):
        found = dm.reconstruct(exposure, "dlg", labels=labels, steps=3, restarts=1)
        assert found.outcome is dm.Outcome.COMPLETED, found.message
        assert found.labels.shape == (2, 5)
    with pytest.raises(ValueError, match=r"labels: expected targets of shape \(B, 5\), got \(2, 14\)"):
        dm.reconstruct(exposure, "dlg", labels=torch.rand(2, 14), steps=3)
