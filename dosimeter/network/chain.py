"""A plain network as a chain of linear layers, convolutions and activations, proved on probes; and the way back through linear ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.network.first_layer import raw_probes, receives_raw_input
from dosimeter.network.probing import is_leaf, record_calls
from dosimeter.types import Refused

Values = Callable[[Tensor], Tensor]  # entry by entry; of an activation's output, unless said otherwise


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation that its output tells."""

    apply: Values  # the activation itself, a function of its input
    slope: Values  # the derivative
    inverse: Values  # the input; NaN where the output does not tell it
    has_zeros: bool = False  # many outputs are exactly zero, as a ReLU's


@dataclass(frozen=True, kw_only=True)
class Link:
    """A linear layer or a convolution, and the activation before it."""

    name: str
    module: nn.Linear | nn.Conv2d
    shape: tuple[int, ...]  # of what it receives of one sample
    before: Activation | None  # None for the first layer, and where no activation stands before it

    @property
    def key(self) -> str:
        """The weight's name in an update."""
        return f"{self.name}.weight" if self.name else "weight"

    @property
    def weight(self) -> Tensor:
        return self.module.weight.detach()


def find_chain(
    model: nn.Module, input_shape: tuple[int, ...], output: str, *, method: str = "linear_recursion", convolutions: bool = False
) -> list[Link]:
    """The layers from the input to the linear layer named `output`; refused, in the name of `method`, where the model is no such chain."""
    probes = raw_probes(model, input_shape)
    with torch.random.fork_rng():
        _, calls = record_calls(model, probes, is_leaf)
    kinds = (nn.Linear, nn.Conv2d) if convolutions else (nn.Linear,)
    broken = _Broken(method, "linear layers, convolutions and activations" if convolutions else "linear layers and activations")
    links: list[Link] = []
    value, before = probes, None
    for name, module, received, result in ((call.name, call.module, call.received, call.given) for call in calls):
        if isinstance(module, nn.Linear | nn.Conv2d):
            dimensions = 2 if isinstance(module, nn.Linear) else 4
            if not isinstance(module, kinds) or received.ndim != dimensions or not _same_entries(received, value):
                raise broken.at(name)
            if any(link.weight.data_ptr() == module.weight.data_ptr() for link in links):
                raise Refused(f"{method} needs each layer's own gradient, and the weight of {name!r} is used twice")
            links.append(Link(name=name, module=module, shape=tuple(received.shape[1:]), before=before))
            value, before = result, None
            if name == output:
                if not receives_raw_input(model, links[0].name, input_shape):
                    raise broken.at(links[0].name)
                return links
        elif _changes_nothing(module) and isinstance(received, Tensor) and _same_entries(received, value):
            value = result
        elif links and before is None and received.shape == value.shape and torch.equal(received, value):
            before, value = _activation(module, name, method), result
        else:
            raise broken.at(name)
    raise broken.at(output)


def _changes_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Flatten | nn.Identity) or (isinstance(module, nn.modules.dropout._DropoutNd) and not module.training)


def _same_entries(received: Tensor, value: Tensor) -> bool:
    return received.numel() == value.numel() and torch.equal(received.flatten(1), value.flatten(1))


@dataclass(frozen=True)
class _Broken:
    """The refusal of a model that is no chain."""

    method: str
    of: str

    def at(self, layer: str) -> Refused:
        return Refused(f"{self.method} needs a plain chain of {self.of}; {layer!r} is not part of one")


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
            error = error if link.before is None else error * link.before.slope(received)
    return received


def _activation(module: nn.Module, name: str, method: str) -> Activation:
    match module:
        case nn.ReLU():
            return Activation(
                apply=module,
                slope=lambda output: (output > _largest_rounding(output)).to(output),
                inverse=lambda output: torch.where(output > _largest_rounding(output), output, torch.nan),
                has_zeros=True,
            )
        case nn.LeakyReLU(negative_slope=float(leak)):
            return Activation(
                apply=module,
                slope=lambda output: torch.where(output > 0, 1.0, leak).to(output),
                inverse=lambda output: torch.where(output > 0, output, output / leak if leak else torch.nan),
            )
        case nn.ELU(alpha=float(alpha)):
            return Activation(
                apply=module,
                slope=lambda output: torch.where(output > 0, 1.0, output + alpha),
                inverse=lambda output: torch.where(output > 0, output, (output / alpha).log1p()),
            )
        case nn.Tanh():
            return Activation(apply=module, slope=lambda output: 1 - output.square(), inverse=torch.atanh)
        case nn.Sigmoid():
            return Activation(apply=module, slope=lambda output: output * (1 - output), inverse=torch.logit)
    raise Refused(f"{method} knows ReLU, LeakyReLU, ELU, Tanh and Sigmoid, whose output tells their slope; {name!r} is {module}")


def _largest_rounding(output: Tensor) -> Tensor:
    """Up to this value an output is rounding, and the neuron does not fire."""
    return 1e-7 * output.abs().max()
