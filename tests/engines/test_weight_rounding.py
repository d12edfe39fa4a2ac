"""The rounding of a difference of weights: its size against real steps, and what it lets methods prove."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.weight_rounding import rounding_of_weights


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


@pytest.mark.parametrize("rate", [1e-3, 0.1, 1.0])
def test_it_is_as_large_as_the_errors_of_real_steps(rate):
    torch.manual_seed(1)
    weight = torch.randn(400, 300) * 0.1
    gradient = torch.randn(400, 300, dtype=torch.float64)
    after = (weight.double() - rate * gradient).float()
    error = (weight.double() - after.double()) / rate - gradient
    public = dm.observe(nn.Linear(4, 3), dm.Batch(torch.rand(1, 4), torch.tensor([0])), training=dm.FedAvg(learning_rate=rate)).public
    expected = rounding_of_weights(weight, gradient, public)
    assert float(error.square().mean().sqrt()) == pytest.approx(float(expected.square().mean().sqrt()), rel=0.1)


def test_a_gradient_is_no_difference():
    public = dm.observe(nn.Linear(4, 3), dm.Batch(torch.rand(1, 4), torch.tensor([0]))).public
    assert float(rounding_of_weights(torch.rand(3, 4), torch.rand(3, 4), public).sum()) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_weights_after_a_step_prove_labels_and_features(seed, rate):
    """What every Flower client sends: the state after a step. Its rounding hides nothing here."""
    rng = torch.Generator().manual_seed(seed)
    inputs, targets = torch.rand(4, 16, generator=rng), torch.randperm(10, generator=rng)[:4]
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    exposure = dm.receive(_net(), model.state_dict(), kind="weights", training=dm.FedAvg(learning_rate=rate), input_shape=(16,))
    labels, features = dm.recover_labels(exposure, "subspace"), dm.recover_features(exposure, "subspace")
    assert labels.certified
    assert labels.labels.tolist() == sorted(targets.tolist())
    assert features.certified.all()
    truth = _net()[:4](inputs)
    errors = torch.cdist(features.features.double(), truth.detach().double()).min(1).values / truth.norm(dim=1).mean()
    assert float(errors.max()) < 1e-3
    assert dm.identifiability(exposure).batch_size == 4
