"""The cheaper forms have the numbers of PyTorch's own, and derivatives of every order."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

import dosimeter as dm
from dosimeter.engines.matching.compiled import Captured
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.paths import Eager
from dosimeter.engines.matching.priors import batch_norm_prior
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.second_order import Convolution, FixedNorm, lighten

LAYERS = {
    "strided": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3),
    "dilated": lambda: nn.Conv2d(3, 2, 3, padding=2, dilation=2),
    "one-dimensional": lambda: nn.Conv1d(3, 4, 3, stride=2),
    "norm": lambda: nn.BatchNorm2d(3),
    "norm without factor": lambda: nn.BatchNorm2d(3, affine=False),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """PyTorch's own layer in eval mode, its cheaper form, and an input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = LAYERS[name]().double()
    if isinstance(own, nn.BatchNorm2d):
        own.running_mean, own.running_var = numbers(3), numbers(3, seed=1) + 0.5
    own.eval()
    light = copy.deepcopy(own)
    lighten(light, grouped_only=False)
    channels = own.weight.shape[1] * own.groups if isinstance(own, nn.Conv1d | nn.Conv2d) else 3
    return own, light, numbers(2, channels, *([7] if isinstance(own, nn.Conv1d) else [7, 6]), seed=2)


@pytest.mark.parametrize("name", LAYERS)
def test_the_cheaper_form_gives_the_numbers_of_pytorch_s_own(name: str) -> None:
    own, light, inputs = pair(name)
    assert isinstance(light, Convolution | FixedNorm)
    assert torch.allclose(own(inputs), light(inputs), rtol=1e-13, atol=1e-14)
    assert dict(own.state_dict()).keys() == dict(light.state_dict()).keys()


def test_a_hardsigmoid_keeps_its_values_and_gains_a_second_derivative() -> None:
    own, light = nn.Hardsigmoid(), nn.Hardsigmoid()
    lighten(light, grouped_only=True)
    at = torch.tensor([-9.0, -3.5, -2.9, -1.0, 0.3, 2.9, 3.1, 8.0], dtype=torch.float64, requires_grad=True)
    assert torch.equal(own(at), light(at))
    slopes = [torch.autograd.grad(module(at).sum(), at)[0] for module in (own, light)]
    assert torch.allclose(*slopes, rtol=1e-7, atol=0)  # PyTorch holds its sixth in single precision
    assert gradgradcheck(lambda x: light(0.9 * x) ** 2, at)
    with pytest.raises(RuntimeError, match="hardsigmoid_backward is not implemented"):
        gradgradcheck(lambda x: own(0.9 * x) ** 2, at)


@pytest.mark.parametrize("name", LAYERS)
def test_its_first_and_second_derivatives_are_those_of_finite_differences(name: str) -> None:
    _, light, inputs = pair(name)
    parameters = tuple(p.detach().requires_grad_() for p in light.parameters())
    names = [n for n, _ in light.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(light, dict(zip(names, values)), (x,))

    variables = (inputs.requires_grad_(), *parameters)
    assert gradcheck(call, variables)
    assert gradgradcheck(call, variables)


@pytest.mark.parametrize("name", LAYERS)
def test_side_by_side_it_has_the_second_derivatives_that_it_has_alone(name: str) -> None:
    _, light, inputs = pair(name)

    def slope_size(x: Tensor) -> Tensor:
        return grad(lambda value: (light(value) ** 3).sum())(x).square().sum()

    both = torch.stack([inputs, 1 - inputs])
    together = vmap(grad(slope_size))(both)
    assert torch.allclose(together, torch.stack([grad(slope_size)(x) for x in both]), rtol=1e-12, atol=0)


def test_a_convolution_without_a_batch_dimension_is_taken() -> None:
    own, light, inputs = pair("strided")
    assert torch.allclose(own(inputs[0]), light(inputs[0]), rtol=1e-13, atol=1e-14)


def test_what_is_not_plain_is_left_alone() -> None:
    class Own(nn.Conv2d):
        pass

    kept = [
        Own(3, 4, 3, groups=1),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(3, 4, 3),
        nn.BatchNorm2d(3).train(),
        nn.BatchNorm2d(3, track_running_stats=False).eval(),
    ]
    types = [type(module) for module in kept]
    lighten(nn.ModuleList(kept), grouped_only=False)
    assert [type(module) for module in kept] == types


def test_a_depthwise_network_has_the_plain_objective_and_gradient() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU6(),
            nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            nn.Linear(384, 5),
        ).double()
    model.eval()
    batch = dm.Batch(numbers(3, 3, 8, 8), torch.tensor([0, 3, 4]))
    exposure = dm.observe(model, batch, training=dm.FedAvg(steps=2, learning_rate=0.1))
    prior = batch_norm_prior(model, weight=1e-2)
    recipe = Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=0.1), steps=1, priors=(prior,))
    plain, light = (Objective(exposure, recipe, batch.targets) for _ in range(2))
    plain.model = copy.deepcopy(exposure.model)
    forms = {name: type(module) for name, module in light.rearrange().model.named_modules()}
    inputs = numbers(1, 3, 3, 8, 8, seed=1)
    terms = Terms(matching=torch.ones((), dtype=torch.float64), priors=inputs.new_tensor([1e-2]))
    reference, found = (path(inputs, None, plain.names, terms) for path in (Eager(plain), Captured(light)))
    assert (forms["3"], forms["1"]) == (Convolution, FixedNorm)
    assert torch.allclose(reference.objective, found.objective, rtol=1e-12, atol=0)
    assert torch.allclose(reference.inputs, found.inputs, rtol=1e-9, atol=1e-12 * float(reference.inputs.abs().max()))
