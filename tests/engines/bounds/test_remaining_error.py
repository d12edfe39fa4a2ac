"""The Bayesian Cramér–Rao bound: its closed form on linear updates, the attack that meets it, and Lanczos from below."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.bounds import remaining_error as module
from dosimeter.engines.bounds.gaussian_prior import GaussianPrior, fit_gaussian
from dosimeter.engines.bounds.jacobian import SampleJacobian
from dosimeter.engines.bounds.remaining_error import local_information, mean_information, remaining_error
from dosimeter.interfaces import Client, Loss
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class LinearLoss(Loss):
    """The logit of the target, so that the gradient of a linear layer is linear in the input."""

    def per_sample(self, logits, targets):
        return logits.gather(1, targets[:, None])[:, 0]

    def logit_gradient(self, logits, targets):
        return nn.functional.one_hot(targets, logits.shape[1]).to(logits)


def _client(model, inputs, targets, loss=None):
    return Client(model=model, batch=dm.Batch(inputs, targets), training=dm.FedSGD(), loss=loss or dm.CrossEntropy())


def _mixing(seed: int, outputs: int, size: int) -> nn.Module:
    """A fixed linear map to fewer numbers, then a linear layer: only the mapped input reaches the gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, outputs, bias=False), nn.Linear(outputs, 3, bias=False)).double()
    model[1].weight.requires_grad_(False)
    return model


def _linear_case(seed: int, size: int = 12, seen: int = 7, noise: float = 0.05):
    model = _mixing(seed, seen, size)
    inputs = torch.rand(2, 1, size, dtype=torch.float64)
    client = _client(model, inputs, torch.tensor([0, 1]), LinearLoss())
    jacobian = SampleJacobian(client=client, sample=0, deviations={"2.weight": noise})
    root = torch.randn(size, size, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(root @ root.T)
    prior = GaussianPrior(mean=torch.zeros(size, dtype=torch.float64), directions=vectors, deviations=values.sqrt(), floor=0.1)
    matrix = model[1].weight.detach() / 2 / noise  # (seen, size): the row of class 0 holds half of the mapped input
    closed = (matrix.T @ matrix + torch.linalg.inv(root @ root.T)).inverse()
    return jacobian, prior, matrix, closed


@pytest.mark.parametrize("seed", range(4))
def test_a_linear_update_has_its_closed_form(seed):
    jacobian, prior, _, closed = _linear_case(seed)
    found = remaining_error(local_information(jacobian), prior, rng=torch.Generator())
    assert found.squared == pytest.approx(float(closed.trace()), rel=1e-6)
    assert found.spread == 0
    assert 5 <= found.hidden <= 6  # of 12 directions, 7 are seen far above the noise


@pytest.mark.parametrize("seed", range(3))
def test_the_posterior_mean_meets_the_bound_within_a_tenth_of_a_decibel(seed):
    jacobian, prior, matrix, closed = _linear_case(seed)
    rng = torch.Generator().manual_seed(seed)
    truth = prior.draw(20_000, rng)
    seen = truth @ matrix.T + torch.randn(20_000, len(matrix), generator=rng, dtype=torch.float64)
    squared = float((seen @ matrix @ closed - truth).square().sum(1).mean())
    ceiling = remaining_error(local_information(jacobian), prior, rng=rng).psnr()
    assert 10 * math.log10(len(prior.mean) / squared) == pytest.approx(ceiling, abs=0.1)


def test_lanczos_stays_below_the_trace_and_near_it(monkeypatch):
    jacobian, prior, _, closed = _linear_case(5, size=40, seen=25)
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    many = remaining_error(local_information(jacobian), prior, probes=400, steps=40, rng=torch.Generator().manual_seed(1))
    assert abs(many.squared - float(closed.trace())) < many.spread
    few = remaining_error(local_information(jacobian), prior, probes=400, steps=4, rng=torch.Generator().manual_seed(1))
    assert few.squared < many.squared


def test_forward_and_backward_products_agree_with_the_whole_jacobian():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()
    client = _client(model, torch.rand(3, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2]))
    deviations = {name: 0.1 + 0.1 * place for place, (name, _) in enumerate(model.named_parameters())}
    jacobian = SampleJacobian(client=client, sample=1, deviations=deviations)

    def sent(point):
        return torch.cat([change.flatten() for change in jacobian.update(point).values()])

    whole = torch.autograd.functional.jacobian(sent, client.batch.inputs[1]).flatten(1)
    direction = torch.randn(1, 4, 4, dtype=torch.float64)
    pushed = torch.cat([change.flatten() for change in jacobian.forward(direction).values()])
    assert torch.allclose(pushed, whole @ direction.flatten(), atol=1e-10)
    assert torch.allclose(jacobian.normal(direction).flatten(), whole.T @ whole @ direction.flatten(), atol=1e-9)
    slow = jacobian._forward_by_two_backward_passes(client.batch.inputs[1], direction)
    assert torch.allclose(torch.cat([change.flatten() for change in slow.values()]), pushed, atol=1e-10)


def test_the_mean_information_is_the_mean_of_the_local_ones():
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    client = _client(model, torch.rand(2, 6, dtype=torch.float64), torch.tensor([0, 1]))
    jacobian = SampleJacobian(client=client, sample=0, deviations={"3.weight": 1.0})
    points, vector = torch.rand(3, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    each = [local_information(jacobian.at(point))(vector) for point in points]
    assert torch.allclose(mean_information(jacobian, points)(vector), torch.stack(each).mean(0))


def test_what_is_not_sent_tells_nothing():
    jacobian, prior, _, _ = _linear_case(1)
    silent = SampleJacobian(client=jacobian.client, sample=0, deviations={})
    assert remaining_error(local_information(silent), prior, rng=torch.Generator()).squared == pytest.approx(prior.variance)


def test_the_fitted_prior_is_that_of_scikit_learn():
    covariance = pytest.importorskip("sklearn.covariance")
    samples = torch.randn(30, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * torch.arange(1, 9)
    prior, reference = fit_gaussian(samples), covariance.LedoitWolf().fit(samples.numpy())
    root = prior.root(torch.eye(8, dtype=torch.float64))
    assert torch.allclose(root @ root, torch.from_numpy(reference.covariance_), rtol=1e-6)
    assert prior.variance == pytest.approx(reference.covariance_.trace())
    few = fit_gaussian(samples[:4])
    assert few.variance == pytest.approx(covariance.LedoitWolf().fit(samples[:4].numpy()).covariance_.trace())


@pytest.mark.parametrize(("samples", "word"), [(torch.rand(1, 4), "at least 2"), (torch.ones(5, 4), "all the same")])
def test_no_prior_without_a_spread(samples, word):
    with pytest.raises(Refused, match=word):
        fit_gaussian(samples)
