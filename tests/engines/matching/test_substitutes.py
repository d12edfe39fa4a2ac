"""Functions without a second derivative: other forms with the same values and slopes, wherever a model calls them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dosimeter as dm
from dosimeter.engines.matching.substitutes import Substitutes

CALLS = {
    "hardsigmoid": functional.hardsigmoid,
    "module": nn.Hardsigmoid(),
    "shuffle": lambda x: torch.native_channel_shuffle(x, 2),
    "shuffling module": nn.ChannelShuffle(2),
    "distances": lambda x: torch.cdist(x.flatten(2), x.flatten(2).flip(1) + 1),
    "other norm": lambda x: torch.cdist(x.flatten(2), x.flatten(2).flip(1) + 1, p=3.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_slopes_stay_and_second_derivatives_exist(name):
    x = 4 * torch.randn(2, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    plain = CALLS[name](x)
    with Substitutes() as mode:
        other = CALLS[name](x)
        assert mode.met
        assert torch.allclose(other, plain, atol=1e-12)
        (slope,) = torch.autograd.grad(other.sin().sum(), x, create_graph=True)
        assert torch.autograd.grad(slope.square().sum(), x)[0].isfinite().all()
    if name != "shuffle":  # has no slope at all without
        (own,) = torch.autograd.grad(plain.sin().sum(), x)
        assert torch.allclose(slope, own, atol=1e-10)


class Gate(nn.Module):
    """Squeeze and excitation with a hardsigmoid by function, and shuffled groups, as in mobile networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Conv2d(1, 8, 3, 2, 1), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.hardswish(self.stem(x))
        x = functional.channel_shuffle(x * functional.hardsigmoid(self.gate(x.mean((2, 3))))[:, :, None, None], 2)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("attack", ["dlg", "inverting_gradients", "sapag"])
def test_matching_attacks_run_on_such_a_model(attack):
    torch.manual_seed(0)
    batch = dm.Batch(torch.rand(2, 1, 8, 8), torch.tensor([1, 3]))
    exposure = dm.observe(Gate(), batch)
    found = dm.reconstruct(exposure, attack, labels=batch.targets, steps=5)
    assert found.outcome is dm.Outcome.COMPLETED, found.message
    start = dm.reconstruct(exposure, attack, labels=batch.targets, steps=1)
    assert found.distance < start.distance
