"""The Bayesian Cramér–Rao bound: its closed form on linear updates, the attack that meets it, and Lanczos from below."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.defenses.clipping import Clipping
from dosimeter.defenses.dpsgd import ClippedSGD
from dosimeter.engines.bounds import remaining_error as module
from dosimeter.engines.bounds.gaussian_prior import GaussianPrior, fit_gaussian
from dosimeter.engines.bounds.jacobian import Jacobian
from dosimeter.engines.bounds.remaining_error import remaining_error
from dosimeter.interfaces import Client, Loss, Mechanism
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class LinearLoss(Loss):
    """The logit of the target, so that the gradient of a linear layer is linear in the input."""

    def per_sample(self, logits, targets):
        return logits.gather(1, targets[:, None])[:, 0]

    def logit_gradient(self, logits, targets):
        return nn.functional.one_hot(targets, logits.shape[1]).to(logits)


def _mechanism(model, inputs, targets, *, loss=None, floors, training=None, transforms=()):
    client = Client(model=model, batch=dm.Batch(inputs, targets), training=training or dm.FedSGD(), loss=loss or dm.CrossEntropy())
    return Mechanism(client=client, transforms=transforms, floors=floors, declared=True, noise_multipliers={})


def _information(jacobian: Jacobian, sample: int = 0, inputs=None):
    """The Fisher information about one sample at its own input."""
    own = jacobian.mechanism.client.batch.inputs[sample] if inputs is None else inputs
    return lambda vectors: jacobian.normal(sample, own.expand(len(vectors), *own.shape), vectors.reshape(-1, *own.shape)).flatten(1)


def _linear_case(seed: int, size: int = 12, seen: int = 7, noise: float = 0.05):
    """A fixed linear map to fewer numbers, then a linear layer under a linear loss: the update is linear in the input."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, seen, bias=False), nn.Linear(seen, 3, bias=False)).double()
    model[1].weight.requires_grad_(False)
    inputs = torch.rand(2, 1, size, dtype=torch.float64)
    jacobian = Jacobian(_mechanism(model, inputs, torch.tensor([0, 1]), loss=LinearLoss(), floors={"2.weight": noise}))
    root = torch.randn(size, size, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(root @ root.T)
    prior = GaussianPrior(mean=torch.zeros(size, dtype=torch.float64), directions=vectors, deviations=values.sqrt(), floor=0.1)
    matrix = model[1].weight.detach() / 2 / noise  # (seen, size): the row of class 0 holds half of the mapped input
    closed = (matrix.T @ matrix + torch.linalg.inv(root @ root.T)).inverse()
    return jacobian, prior, matrix, closed


@pytest.mark.parametrize("seed", range(4))
def test_a_linear_update_has_its_closed_form(seed):
    jacobian, prior, _, closed = _linear_case(seed)
    found = remaining_error(_information(jacobian), prior, rng=torch.Generator())
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
    ceiling = remaining_error(_information(jacobian), prior, rng=rng).psnr()
    assert 10 * math.log10(len(prior.mean) / squared) == pytest.approx(ceiling, abs=0.1)


def test_lanczos_stays_below_the_trace_and_near_it(monkeypatch):
    jacobian, prior, _, closed = _linear_case(5, size=40, seen=25)
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    many = remaining_error(_information(jacobian), prior, probes=400, steps=40, rng=torch.Generator().manual_seed(1))
    assert abs(many.squared - float(closed.trace())) < many.spread
    few = remaining_error(_information(jacobian), prior, probes=400, steps=4, rng=torch.Generator().manual_seed(1))
    assert few.squared < many.squared


def _whole_jacobian(jacobian: Jacobian, sample: int):
    def sent(point):
        return torch.cat([change.flatten() for change in jacobian.update(sample, point).values()])

    return torch.autograd.functional.jacobian(sent, jacobian.mechanism.client.batch.inputs[sample]).flatten(1)


def _small_net(train: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()
    return model.train(train)


SETTINGS = {
    "one gradient": (False, None, ()),
    "batch norm in train mode": (True, None, ()),
    "several steps": (False, dm.FedAvg(learning_rate=0.1, steps=2), ()),
    "clipping": (False, None, (Clipping(max_norm=0.5).clip,)),
    "clipping of each sample": (False, ClippedSGD(max_norm=0.5), ()),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_products_agree_with_the_whole_jacobian(setting):
    train, training, transforms = SETTINGS[setting]
    model = _small_net(train)
    floors = {name: 0.1 + 0.1 * place for place, (name, _) in enumerate(model.named_parameters())}
    inputs = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    jacobian = Jacobian(_mechanism(model, inputs, torch.tensor([0, 1, 2]), floors=floors, training=training, transforms=transforms))
    assert jacobian.separable == (setting in ("one gradient", "clipping", "clipping of each sample"))
    whole = _whole_jacobian(jacobian, 1)
    directions = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    expected = directions.flatten(1) @ whole.T @ whole
    found = jacobian.normal(1, inputs[1].expand(2, 1, 4, 4), directions)
    assert torch.allclose(found.flatten(1), expected, rtol=1e-8)
    for product in (jacobian.forward, jacobian.forward_by_two_backward_passes):
        pushed = torch.cat([change.flatten() for change in product(1, inputs[1], directions[0]).values()])
        assert torch.allclose(pushed, whole @ directions[0].flatten(), rtol=1e-8, atol=1e-12)


def test_what_is_not_sent_tells_nothing():
    jacobian, prior, _, _ = _linear_case(1)
    silent = Jacobian(replace(jacobian.mechanism, floors={}))
    assert remaining_error(_information(silent), prior, rng=torch.Generator()).squared == pytest.approx(prior.variance)


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
