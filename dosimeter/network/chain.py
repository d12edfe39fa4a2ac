"""A fully-connected network as a chain of linear layers and activations, proved on probes, and the way back to its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.network.probing import is_leaf, record_calls
from dosimeter.randomness import generator
from dosimeter.types import Refused

PROBES = 8

Slope = Callable[[Tensor], Tensor]  # an activation's derivative as a function of its output


@dataclass(frozen=True)
class Link:
    """A linear layer, and the derivative of the activation before it."""

    name: str
    weight: Tensor  # (out, in)
    slope_before: Slope | None  # None for the first layer, and where no activation stands before it

    @property
    def key(self) -> str:
        """The weight's name in an update."""
        return f"{self.name}.weight" if self.name else "weight"


def find_chain(model: nn.Module, input_shape: tuple[int, ...], output: str) -> list[Link]:
    """The layers from the input to the linear layer named `output`; refused where the model is no such chain."""
    like = next(model.parameters())
    probes = torch.rand(PROBES, *input_shape, generator=generator(0, "chain probes")).to(like)
    with torch.random.fork_rng():
        _, calls = record_calls(model, probes, is_leaf)
    links: list[Link] = []
    value, slope = probes.flatten(1), None
    for name, module, received, result in ((call.name, call.module, call.received, call.given) for call in calls):
        if isinstance(module, nn.Linear):
            if received.shape != value.shape or not torch.equal(received, value):
                raise Refused(_NOT_A_CHAIN.format(name))
            if any(link.weight.data_ptr() == module.weight.data_ptr() for link in links):
                raise Refused(f"linear_recursion needs each layer's own gradient, and the weight of {name!r} is used twice")
            links.append(Link(name, module.weight.detach(), slope))
            value, slope = result, None
            if name == output:
                return links
        elif isinstance(module, nn.Flatten | nn.Identity) or (isinstance(module, nn.modules.dropout._DropoutNd) and not module.training):
            value = result.flatten(1)
        elif links and slope is None and received.shape == value.shape and torch.equal(received, value):
            slope, value = _slope(module, name), result
        else:
            raise Refused(_NOT_A_CHAIN.format(name))
    raise Refused(_NOT_A_CHAIN.format(output))


_NOT_A_CHAIN = "linear_recursion needs a plain chain of linear layers and activations; {!r} is not part of one"


def walk_back(links: list[Link], gradients: dict[str, Tensor], error: Tensor) -> Tensor:
    """From ∂L/∂z of the last layer (C,) to the network's input (d,), layer by layer in float64 (soft-labels Eqs. 6-7).

    A layer's input is ∇Wᵀ ∂L/∂z / ‖∂L/∂z‖², the least-squares form of Eq. (7), which uses every row instead of one.
    """
    received = error
    for position, link in enumerate(reversed(links)):
        gradient = gradients[link.key].double()
        received = gradient.T @ error / error.square().sum()  # Eq. (7)
        if position < len(links) - 1:
            error = link.weight.double().T @ error  # Eq. (6)
            error = error if link.slope_before is None else error * link.slope_before(received)
    return received


def _slope(module: nn.Module, name: str) -> Slope:
    match module:
        case nn.ReLU():
            return lambda output: (output > _largest_rounding(output)).to(output)
        case nn.LeakyReLU(negative_slope=float(leak)):
            return lambda output: torch.where(output > 0, 1.0, leak).to(output)
        case nn.ELU(alpha=float(alpha)):
            return lambda output: torch.where(output > 0, 1.0, output + alpha)
        case nn.Tanh():
            return lambda output: 1 - output.square()
        case nn.Sigmoid():
            return lambda output: output * (1 - output)
    raise Refused(f"linear_recursion knows ReLU, LeakyReLU, ELU, Tanh and Sigmoid, whose output tells their slope; {name!r} is {module}")


def _largest_rounding(output: Tensor) -> Tensor:
    """Up to this value an output is rounding, and the neuron does not fire."""
    return 1e-7 * output.abs().max()
