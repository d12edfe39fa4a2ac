"""SPEAR on fully connected ReLU nets: exact for small batches, refused where the zeros do not show."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.maps.spear import _sparsest_basis


def network(activation: nn.Module, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 400, bias=bias), activation, nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
        ).eval()


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_the_images_themselves_come_out_of_the_first_layer(digits, samples):
    images, labels = digits
    batch = dm.Batch(images[50 : 50 + samples], labels[50 : 50 + samples])
    found = dm.recover_maps(dm.observe(network(nn.ReLU()), batch, declare_batch_size=False), method="spear", layer="1")
    assert found.batch_size == samples
    assert not found.certified.any()
    distance, partners = torch.cdist(found.maps.flatten(1), batch.inputs.flatten(1).double()).min(1)
    assert sorted(partners.tolist()) == list(range(samples))
    assert float((distance / batch.inputs.flatten(1).norm(dim=1)[partners]).max()) < 1e-4


def test_refusals(digits, classifier):
    images, labels = digits
    batch = dm.Batch(images[:4], labels[:4])
    with pytest.raises(dm.Refused, match="spear finds 0 of 4 samples"):  # a tanh switches nothing off
        dm.recover_maps(dm.observe(network(nn.Tanh()), batch), method="spear", layer="1", submatrices=5000)
    with pytest.raises(dm.Refused, match="no bias gradient was sent"):
        dm.recover_maps(dm.observe(network(nn.ReLU(), bias=False), batch), method="spear", layer="1")
    with pytest.raises(dm.Refused, match="needs the gradient of a hidden linear layer 'nowhere'; there are: 1, 3"):
        dm.recover_maps(dm.observe(network(nn.ReLU()), batch), method="spear", layer="nowhere")


def test_a_mixture_of_two_samples_gives_way_once_both_are_found():
    """It may have more zeros than a third sample, which it must not push out."""
    first, second, third = torch.eye(3, dtype=torch.float64)
    mixture = (first + second) / 2**0.5
    directions = torch.stack([mixture, third, second, first])
    assert _sparsest_basis(directions, torch.tensor([40, 30, 50, 45])).tolist() == [2, 3, 1]
    assert _sparsest_basis(directions[:2], torch.tensor([40, 30])).tolist() == [0, 1]
