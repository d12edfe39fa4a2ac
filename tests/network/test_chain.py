"""Fully-connected networks as chains, and the way back from the last layer's error to the input."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dosimeter as dm
from dosimeter.network.chain import find_chain, walk_back
from dosimeter.types import Refused

ACTIVATIONS = [nn.ReLU(), nn.LeakyReLU(0.1), nn.ELU(0.7), nn.Tanh(), nn.Sigmoid()]


def network(activation: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = (nn.Flatten(), nn.Linear(16, 40), activation, nn.Identity(), nn.Linear(40, 30), nn.Linear(30, 5))
        return nn.Sequential(*layers).double().eval()


def test_the_links_are_the_linear_layers_in_order():
    model = network(nn.Tanh())
    links = find_chain(model, (1, 4, 4), "5")
    assert [link.key for link in links] == ["1.weight", "4.weight", "5.weight"]
    assert all(torch.equal(link.weight, model.get_parameter(link.key)) for link in links)
    assert [link.before is None for link in links] == [True, False, True]
    assert [link.name for link in find_chain(model, (1, 4, 4), "4")] == ["1", "4"]
    assert find_chain(nn.Linear(4, 2), (4,), "")[0].key == "weight"


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda module: type(module).__name__)
def test_the_way_back_ends_at_the_input(activation):
    model = network(activation)
    one = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = model(one)
    error = logits.detach().softmax(1)[0] - torch.eye(5)[2]
    cross_entropy(logits, torch.tensor([2])).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = walk_back(find_chain(model, (1, 4, 4), "5"), gradients, error)
    torch.testing.assert_close(found, one.flatten(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("layers", "phrase"),
    [
        ((nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), "'0' is not part of one"),
        ((nn.Flatten(), nn.Tanh(), nn.Linear(16, 3)), "'1' is not part of one"),
        ((nn.Flatten(), nn.Linear(16, 3), nn.GELU(), nn.Linear(3, 3)), "knows ReLU"),
        ((nn.Flatten(), nn.Linear(16, 3)), "'3' is not part of one"),
    ],
)
def test_what_is_no_chain_is_refused(layers, phrase):
    with pytest.raises(Refused, match=phrase):
        find_chain(nn.Sequential(*layers).eval(), (1, 4, 4), "3")


def test_a_weight_that_is_used_twice_is_refused():
    layer = nn.Linear(16, 16)
    with pytest.raises(Refused, match="used twice"):
        find_chain(nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(16, 3)).eval(), (1, 4, 4), "4")


class Negative(nn.Module):
    """Turns black into white before the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(1 - inputs)


@pytest.mark.parametrize("first", [nn.Flatten(), nn.Identity()])
def test_an_input_that_is_changed_before_the_first_layer_is_no_end_of_a_chain(first):
    """The way back would end at what the layer received, which is no sample."""
    model = Negative(nn.Sequential(first, nn.Flatten(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 5)))
    with pytest.raises(Refused, match="plain chain"):
        find_chain(model, (1, 4, 4), "net.4")
    exposure = dm.observe(model, dm.Batch(torch.rand(1, 1, 4, 4), torch.tensor([2])))
    for attack in ("linear_recursion", "rgap"):
        with pytest.raises(Refused, match="plain chain"):
            dm.reconstruct(exposure, attack)
