"""Maps behind activations that can be negative: the head's proved features tell the samples apart."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def small_net(activation: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        layers = [
            nn.Conv2d(1, 48, 3, 2, 1),
            activation(),
            nn.Conv2d(48, 48, 3, 2, 1),
            activation(),
            nn.Conv2d(48, 48, 3, 1, 1),
            activation(),
        ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)).eval()


@pytest.mark.parametrize("activation", [nn.SiLU, nn.GELU, nn.LeakyReLU])
def test_every_sample_is_certified_and_right_within_its_bar(digits, activation):
    images, labels = digits
    model = small_net(activation)
    found = dm.recover_maps(dm.observe(model, dm.Batch(images[:3], labels[:3])))
    assert found.layer == "4"
    assert found.certified.all()
    truth = model[:4](images[:3]).detach().double().flatten(1)
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == [0, 1, 2]
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars).all()


def test_without_the_heads_gradient_nothing_tells_the_samples_apart(digits):
    images, labels = digits
    batch = dm.Batch(images[:3], labels[:3])
    withheld = (dm.defense("head_withheld"),)
    with pytest.raises(dm.Refused, match="the head's samples do not tell its samples apart"):
        dm.recover_maps(dm.observe(small_net(nn.SiLU), batch, defenses=withheld))
