"""Gauss-Newton steps from maps to inputs."""

import torch
from torch import Generator, nn

from dosimeter.engines.downward.inversion import MapTargets, invert
from dosimeter.engines.downward.walk import KnownMap
from dosimeter.network.tape import record, tensors_of


def test_a_step_that_is_too_long_is_shortened() -> None:
    """The whole step leads to larger misfits. With a step a quarter as long, a few steps are enough."""
    torch.manual_seed(0)
    steep = nn.Linear(6, 24)
    nn.init.uniform_(steep.weight, -5, 5)
    model = nn.Sequential(steep, nn.Tanh()).double()
    inputs = torch.rand(5, 6, generator=Generator().manual_seed(1), dtype=torch.float64)
    tape, tensors = record(model, torch.zeros_like(inputs)), tensors_of(model)
    (maps,) = tape.run({0: inputs}, tensors, [tape.output])
    known = KnownMap(value=tape.output, maps=maps, known=torch.ones_like(maps, dtype=torch.bool), misfit=0.0)
    targets = MapTargets(tape=tape, tensors=tensors, maps=[known])
    found = invert(targets, torch.full_like(inputs, 0.5), (torch.zeros(1), torch.ones(1)), steps=11, products=30)
    torch.testing.assert_close(found.inputs, inputs, atol=1e-5, rtol=0)


def test_a_good_start_is_not_left_for_softer_maps() -> None:
    """Soft rectifiers let more through than hard ones. With them the first step would lead away from a start that is nearly right."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(40, 40), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), *layers).double()
    inputs = torch.rand(3, 8, generator=Generator().manual_seed(1), dtype=torch.float64)
    tape, tensors = record(model, torch.zeros_like(inputs)), tensors_of(model)
    (maps,) = tape.run({0: inputs}, tensors, [tape.output])
    known = KnownMap(value=tape.output, maps=maps, known=torch.ones_like(maps, dtype=torch.bool), misfit=0.0)
    targets = MapTargets(tape=tape, tensors=tensors, maps=[known])
    start = (inputs + 0.03 * torch.randn(3, 8, generator=Generator().manual_seed(2), dtype=torch.float64)).clamp(0, 1)
    found = invert(targets, start, (torch.zeros(1), torch.ones(1)), steps=3, products=30)
    assert (found.inputs - inputs).norm() < 0.1 * (start - inputs).norm()
