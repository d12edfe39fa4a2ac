"""The convolutions of a model whose gradients the client sent, and which of them can show their maps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Exposure
from dosimeter.network.probing import record_inputs
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator

PROBES = 4  # random images on which a layer's input must never be negative


@dataclass(frozen=True, kw_only=True)
class ConvolutionLayer:
    """One convolution: its gradient, the grid it works on, and why its maps cannot be read where they cannot."""

    name: str
    module: nn.Conv2d
    gradient: Tensor  # (out, in, k, k) as it was sent
    height: int
    width: int
    non_negative: bool  # its inputs come out of a ReLU, as far as probes tell
    obstacle: str  # "" where the algebra applies

    @property
    def positions(self) -> int:
        return self.height * self.width

    @property
    def most_samples(self) -> int:
        """The largest batch whose positions the channels can hold."""
        return min(self.module.in_channels, self.module.out_channels) // self.positions


def find_convolutions(exposure: Exposure) -> list[ConvolutionLayer]:
    """Every convolution whose weight gradient was sent, in the order in which the model runs them."""
    parameter = next(exposure.model.parameters())
    rng = generator(0, "probes of the convolutions")
    pixels = torch.rand(PROBES, *exposure.public.input_shape, generator=rng)
    probes = from_pixels(pixels, exposure.public.normalization).to(parameter)
    _, received = record_inputs(exposure.model, probes, lambda _, module: isinstance(module, nn.Conv2d))
    calls: dict[str, list[Tensor]] = {}
    for name, _, inputs in received:
        calls.setdefault(name, []).append(inputs)
    found = []
    for name, inputs in calls.items():
        gradient = exposure.update.get(f"{name}.weight" if name else "weight")
        module = exposure.model.get_submodule(name)
        if gradient is None or not isinstance(module, nn.Conv2d):
            continue
        found.append(
            ConvolutionLayer(
                name=name,
                module=module,
                gradient=gradient,
                height=inputs[0].shape[-2],
                width=inputs[0].shape[-1],
                non_negative=bool((inputs[0] >= 0).all()) and bool((inputs[0] == 0).any()),
                obstacle=_obstacle(module, len(inputs)),
            )
        )
    return found


def _obstacle(module: nn.Conv2d, calls: int) -> str:
    """Why the gradient is not Dᵀ S_o A with shifts of one grid."""
    if calls > 1:
        return "the layer runs more than once in a pass, and its gradient is the sum"
    if module.groups > 1:
        return f"{module.groups} groups: each holds {module.in_channels // module.groups} channels only"
    if any(stride > 1 for stride in module.stride):
        return "a stride above 1 leaves positions out"
    if math.prod(module.kernel_size) == 1:
        return "a kernel of 1 by 1 has no shifts"
    if any(side % 2 == 0 for side in module.kernel_size):
        return "an even kernel has no centre"
    if module.padding_mode != "zeros":
        return f"{module.padding_mode} padding drops nothing at the edge"
    if any(dilation > 1 for dilation in module.dilation):
        return "a dilated kernel shifts by more than one"
    if module.padding != "same" and any(pad != side // 2 for pad, side in zip(module.padding, module.kernel_size)):
        return "the padding does not keep the grid's size"
    return ""
