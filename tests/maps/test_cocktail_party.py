"""Independent components: right where the samples are independent, wrong where they are alike."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def observed(inputs: torch.Tensor) -> dm.Exposure:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3000, 60), nn.ReLU(), nn.Linear(60, 10)).eval()
    return dm.observe(model, dm.Batch(inputs, torch.arange(len(inputs))))


def error(found: dm.MapEstimate, inputs: torch.Tensor) -> float:
    truth = inputs.flatten(1).double()
    distance, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == list(range(len(truth)))
    return float((distance / truth.norm(dim=1)[partners]).max())


def test_independent_sources_come_apart():
    rng = torch.Generator().manual_seed(3)
    inputs = torch.rand(3, 1, 50, 60, generator=rng) ** 4  # far from Gaussian, and independent
    found = dm.recover_maps(observed(inputs), method="cocktail_party")
    assert found.batch_size == 3
    assert not found.certified.any()
    assert error(found, inputs) < 0.2


def test_gaussian_sources_do_not(digits):
    rng = torch.Generator().manual_seed(3)
    inputs = torch.randn(3, 1, 50, 60, generator=rng)
    found = dm.recover_maps(observed(inputs), method="cocktail_party")
    truth = inputs.flatten(1).double()
    distance, _ = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert float((distance / truth.norm(dim=1)).max()) > 0.3


def test_a_net_without_linear_layers_but_the_head_is_refused(digits):
    images, labels = digits
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)).eval()
    with pytest.raises(dm.Refused, match="needs the gradient of a hidden linear layer; the update has none"):
        dm.recover_maps(dm.observe(model, dm.Batch(images[:2], labels[:2])), method="cocktail_party")
