"""COPA: the layer in front closes the gap that a layer's own equations leave."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def network(activation: nn.Module, *, bias: bool, logits: int, mode: str = "zeros") -> nn.Sequential:
    """The second convolution's equations determine less than two thirds of its input."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = nn.Conv2d(1, 10, 3, 1, 1, bias=bias, padding_mode=mode)
        second = nn.Conv2d(10, 4, 3, 2, 1, bias=bias, padding_mode=mode)
        return nn.Sequential(first, activation, second, activation, nn.Flatten(), nn.Linear(64, logits, bias=bias)).eval()


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.ReLU(), nn.Sigmoid(), nn.Tanh()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_the_pull_back_determines_what_the_layer_leaves_open(digits, activation, bias):
    images, labels = digits
    batch = dm.Batch(images[7:8], labels[7:8])
    exposure = dm.observe(network(activation, bias=bias, logits=10), batch)
    bare = dm.reconstruct(exposure, "rgap", labels=batch.targets)
    found = dm.reconstruct(exposure, "copa", labels=batch.targets)
    assert float((bare.inputs - batch.inputs).abs().max()) > 0.1
    assert float((found.inputs - batch.inputs).abs().max()) < 1e-3


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_other_paddings(digits, mode):
    images, labels = digits
    batch = dm.Batch(images[9:10], labels[9:10])
    found = dm.reconstruct(dm.observe(network(nn.Tanh(), bias=True, logits=10, mode=mode), batch), "copa")
    assert float((found.inputs - batch.inputs).abs().max()) < 1e-3
    assert found.outcome is dm.Outcome.COMPLETED


def test_where_every_layer_has_full_rank_it_is_rgap(digits):
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 8, 3, 2, 1), nn.Flatten(), nn.Linear(128, 10)).eval()
    exposure = dm.observe(model, dm.Batch(images[5:6], labels[5:6]))
    assert torch.equal(dm.reconstruct(exposure, "copa").inputs, dm.reconstruct(exposure, "rgap").inputs)


def test_a_batch_of_two_is_refused(digits):
    images, labels = digits
    with pytest.raises(dm.Refused, match="copa needs a batch of one"):
        dm.reconstruct(dm.observe(network(nn.Tanh(), bias=True, logits=10), dm.Batch(images[:2], labels[:2])), "copa")
