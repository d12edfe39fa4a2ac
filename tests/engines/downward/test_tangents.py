"""Derivatives along a tape are those of PyTorch, forwards and backwards."""

import pytest
import torch
from torch import Generator, nn

from dosimeter.engines.downward.norms import fix_norms
from dosimeter.engines.downward.softening import SOFTNESS, soften
from dosimeter.engines.downward.tangents import Tangents
from dosimeter.network.tape import record, tensors_of


class Net(nn.Module):
    """All that has a rule of its own, and an activation that has none."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, 1, 1), nn.Conv2d(6, 6, 3, 2, 1, bias=False)
        self.shortcut = nn.Conv2d(6, 6, 1, 2)
        self.norm = nn.BatchNorm2d(6) if norm == "batch" else nn.GroupNorm(2, 6)
        nn.init.uniform_(self.norm.weight)
        nn.init.uniform_(self.norm.bias)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self.norm(self.first(inputs)))
        maps = nn.functional.silu(self.second(maps)) + self.shortcut(maps)
        return self.last(torch.max_pool2d(maps, 2).mean((2, 3)) + 1.0)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_derivatives_are_those_of_automatic_differentiation(norm, training, soft) -> None:
    torch.manual_seed(0)
    model = Net(norm).train(training)
    inputs, change = torch.rand(3, 2, 8, 8, dtype=torch.float64), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    tape, tensors = fix_norms(record(model.double(), torch.zeros_like(inputs)), tensors_of(model, torch.float64))
    if soft:
        tape, tensors = soften(tape), {**tensors, SOFTNESS: torch.tensor([0.5, 0.1, 1.0], dtype=torch.float64)}
    wanted = [tape.output - 2, tape.output]

    def run(given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tape.run({0: given}, tensors, wanted))

    tangents = Tangents(tape, tensors, inputs, wanted)
    value, along = torch.autograd.functional.jvp(run, inputs, change)
    for one, other in zip((*tangents.values, *tangents.along(change)), (*value, *along)):
        torch.testing.assert_close(one, other)
    weights = [torch.randn(one.shape, generator=Generator().manual_seed(1), dtype=torch.float64) for one in value]
    torch.testing.assert_close(tangents.back(weights), torch.autograd.functional.vjp(run, inputs, tuple(weights))[1])
