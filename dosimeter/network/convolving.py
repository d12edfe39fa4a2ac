"""A convolution without its bias, in any precision, and its transpose."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect", "replicate": "replicate"}  # torch's names for them


def padded(maps: Tensor, module: nn.Conv2d) -> Tensor:
    """The maps (B, in, H, W) with what the convolution adds around them."""
    widths = list(module._reversed_padding_repeated_twice)  # what torch itself pads with, left and right, above and below
    return pad(maps, widths, mode=MODES[module.padding_mode])


def convolve(module: nn.Conv2d, maps: Tensor) -> Tensor:
    """The convolution without its bias, in the dtype of `maps`."""
    weight = module.weight.detach().to(maps)
    return conv2d(padded(maps, module), weight, stride=module.stride, dilation=module.dilation, groups=module.groups)


def carry_back(module: nn.Conv2d | nn.Linear, shape: tuple[int, ...], slopes: Tensor) -> Tensor:
    """The slopes (B, *shape) at a layer's input, from those at its output."""
    if isinstance(module, nn.Linear):
        return (slopes.flatten(1) @ module.weight.detach().to(slopes)).reshape(-1, *shape)
    maps = torch.zeros(len(slopes), *shape, dtype=slopes.dtype, device=slopes.device, requires_grad=True)
    with torch.enable_grad():
        outputs = convolve(module, maps)
    return torch.autograd.grad(outputs, maps, slopes.reshape(outputs.shape))[0]
