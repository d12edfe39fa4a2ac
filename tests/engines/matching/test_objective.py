"""The objective with its layers laid end to end: the same numbers from fewer operations."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dosimeter as dm
from dosimeter.engines.matching.distances import Cosine, Distance, GaussianKernel, SquaredError
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.paths import Eager, Functional
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate

TARGETS = torch.tensor([1, 4, 2])


class Counted(TorchDispatchMode):
    """How many operations are handed to the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def objectives(distance: Distance) -> list[Objective]:
    """One as it is and one laid end to end in channels-last order."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(216, 5)]
        exposure = dm.observe(nn.Sequential(*layers).double().eval(), dm.Batch(torch.rand(3, 3, 8, 8).double(), TARGETS))
    recipe = Recipe(distance=distance, optimiser=Adam(), rate=Rate(start=0.1), steps=1)
    plain = Objective(exposure, recipe, TARGETS)
    return [plain, plain.rearrange(end_to_end=True, channels_last=True)]


@pytest.mark.parametrize(
    "distance", [Cosine(), SquaredError(), SquaredError(relative=True, weight=3.0), Cosine(per_layer=True), GaussianKernel()]
)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_layers_end_to_end_have_the_same_distance_and_slope(distance: Distance, masked: bool, weighted: bool) -> None:
    plain, laid = objectives(distance)
    assert laid.end_to_end is distance.joint
    rng = torch.Generator().manual_seed(1)
    inputs = torch.rand(2, 3, 3, 8, 8, generator=rng, dtype=torch.float64)
    masks = tuple((torch.rand(t.shape, generator=rng) > 0.3).double() for t in plain.target.values()) if masked else None
    layers = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 2.0], dtype=torch.float64) if weighted else None
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(0), layers=layers, masks=masks)
    expected = Eager(plain)(inputs, None, plain.names, terms)
    for evaluate in (Eager(laid), Functional(laid)):
        found = evaluate(inputs, None, laid.names, terms)
        assert torch.allclose(found.distance, expected.distance, rtol=1e-10, atol=0)
        assert torch.allclose(found.inputs, expected.inputs, rtol=1e-10, atol=1e-14)


def test_layers_end_to_end_take_fewer_operations() -> None:
    counts = []
    for objective in objectives(Cosine()):
        inputs = torch.rand(1, 3, 3, 8, 8, dtype=torch.float64)
        masks = tuple(torch.ones_like(target) for target in objective.target.values())
        terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(0), layers=inputs.new_ones(6), masks=masks)
        with Counted() as counted:
            Functional(objective)(inputs, None, objective.names, terms)
        counts.append(counted.count)
    assert counts[1] < 0.8 * counts[0]
