"""A linear layer before the network proper."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.checks.inserted_layer import measure
from dosimeter.inspection.thresholds import THRESHOLDS


class Inserted(nn.Module):
    """A linear layer on the whole input; the network behind it gets α times the input plus noise."""

    def __init__(self, network: nn.Module, share: float) -> None:
        super().__init__()
        self.first, self.network, self.share = nn.Linear(768, 8), network, share
        self.noise = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))

    def forward(self, inputs):
        self.first(inputs.flatten(1))
        return self.network(self.share * inputs + (1 - self.share) * self.noise)


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_the_statistic_is_the_correlation(perceptron, received, share) -> None:
    seen = received(Inserted(perceptron(), share))
    passed_on = share * seen.inputs + (1 - share) * Inserted(perceptron(), share).noise  # the same noise for every sample
    expected = torch.corrcoef(torch.stack([seen.inputs.flatten(), passed_on.flatten()]).double())[0, 1]
    assert measure(seen)[0] == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(("attack", "options"), [("imprint", {"bins": 50}), ("trap_weights", {"rows": 50})])
def test_an_inserted_layer_is_found(received, attack, options) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))
    rigged = dm.attack(attack, input_shape=(3, 16, 16), **options).tamper(model)
    assert measure(received(rigged))[0] > THRESHOLDS["inserted_layer"]


def test_a_network_that_begins_with_a_linear_layer_is_honest(perceptron, received) -> None:
    assert measure(received(perceptron()))[0] == 0.0
