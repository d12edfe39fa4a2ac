"""The stack of linear layers with ReLU between them that ends in the head: found, and proved on probes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from dosimeter.interfaces import Exposure
from dosimeter.network.convolving import padded
from dosimeter.network.head import PROBES
from dosimeter.network.probing import record_calls
from dosimeter.network.random_texts import random_texts
from dosimeter.randomness import generator


@dataclass(frozen=True, kw_only=True)
class StackedLayer:
    """One layer of the stack; a convolution with a single output position is a linear layer on the part of its input that it sees."""

    name: str
    weight: Tensor  # (N, M)
    bias: Tensor | None  # (N,)
    module: nn.Linear | nn.Conv2d

    def rows_of(self, received: Tensor) -> Tensor:
        """What each row of the weight is multiplied with: (n, M)."""
        if isinstance(self.module, nn.Linear):
            return received.flatten(1)
        layer = self.module
        moved = unfold(padded(received, layer), layer.kernel_size, dilation=layer.dilation, stride=layer.stride)  # (n, M, 1)
        return moved.flatten(1)


def find_linear_stack(exposure: Exposure, head: str) -> list[StackedLayer]:
    """The layers that lead to the head through ReLUs alone, the farthest first, the head last.

    The proof of each link: on random inputs in eval mode, the ReLU of its output is the next layer's input.
    """
    passed = _record(exposure)
    chain = [head]
    while (received := passed[chain[0]][0]).ndim == 2:
        before = next((name for name, (_, output) in passed.items() if name not in chain and _feeds_through_relu(output, received)), None)
        if before is None:
            break
        chain.insert(0, before)
    return [_stacked_layer(exposure.model, name) for name in chain]


def _feeds_through_relu(output: Tensor, received: Tensor) -> bool:
    flat = output.flatten(1)
    if output.ndim > 2 and flat.shape[1] != output.shape[1]:  # with several output positions it is no linear layer on its flattened input
        return False
    return flat.shape == received.shape and torch.allclose(flat.relu(), received, rtol=1e-4, atol=1e-6)


def _record(exposure: Exposure) -> dict[str, tuple[Tensor, Tensor]]:
    """What every linear and convolutional layer receives and gives on the probes, by name; of several calls the last."""
    rng, public = generator(0, "chain probes"), exposure.public
    if public.blank is not None:
        probes = random_texts(exposure.model, public.blank, PROBES, rng)
    else:
        probes = torch.randn(PROBES, *public.input_shape, generator=rng).to(next(exposure.model.parameters()))
    _, calls = record_calls(exposure.model, probes, _is_linear, evaluate=True)
    return {call.name: (call.received, call.given) for call in calls}


def _is_linear(_: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _stacked_layer(model: nn.Module, name: str) -> StackedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    bias = None if layer.bias is None else layer.bias.detach()
    return StackedLayer(name=name, weight=layer.weight.detach().flatten(1), bias=bias, module=layer)
