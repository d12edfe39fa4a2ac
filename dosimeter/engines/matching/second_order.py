"""Layers in forms with cheaper second derivatives, or with one where PyTorch's own have none. Values and parameter names stay the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Settings = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups


def lighten(model: nn.Module, *, grouped_only: bool) -> None:
    """Give plain convolutions, and plain batch norms in eval mode, their cheaper forms, in place; or grouped convolutions alone.

    In eager double backward only grouped convolutions gain: it computes the slope at the kernel although nobody needs it. A hardsigmoid
    always gets the form that has a second derivative.
    """
    for module in model.modules():
        if _is_plain_convolution(module, grouped_only):
            module.__class__ = Convolution
        elif not grouped_only and _is_fixed_norm(module):
            module.__class__ = FixedNorm
        elif type(module) is nn.Hardsigmoid:
            module.__class__ = Hardsigmoid


def _is_plain_convolution(module: nn.Module, grouped_only: bool) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    return module.padding_mode == "zeros" and not isinstance(module.padding, str) and (module.groups > 1 or not grouped_only)


def _is_fixed_norm(module: nn.Module) -> bool:
    plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return plain and not module.training and getattr(module, "running_mean", None) is not None


class Hardsigmoid(nn.Hardsigmoid):
    """clamp(x + 3, 0, 6) / 6. PyTorch's own hardsigmoid has a first derivative only."""

    def forward(self, input: Tensor) -> Tensor:
        return (input + 3).clamp(0, 6) / 6


class Convolution(nn.modules.conv._ConvNd):
    """A convolution as one side of T(s, x, w) = ⟨s, x * w⟩, which is linear in each of slope, input and kernel.

    Every derivative of every order is T with one of the three taken out: `_Output`, `_Input` and `_Kernel` below, and each of their
    backward passes is made of the other two. PyTorch's own second derivative also convolves for a slope at the kernel that
    nobody asked for, in eager form with maps as large as the image for a kernel, and one group after the other.
    """

    def forward(self, input: Tensor) -> Tensor:
        kernel, bias = self.weight, self.bias
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, kernel, bias = input.to(dtype), kernel.to(dtype), None if bias is None else bias.to(dtype)
        single = input.ndim == kernel.ndim - 1  # one sample without a batch dimension
        assert not isinstance(self.padding, str)
        settings = (list(self.stride), list(self.padding), list(self.dilation), self.groups)
        output = _Output.apply(input[None] if single else input, kernel, settings)
        assert isinstance(output, Tensor)
        output = output if bias is None else output + bias.view(-1, *[1] * (kernel.ndim - 2))
        return output[0] if single else output


class FixedNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm over running statistics: one factor and one shift a channel.

    PyTorch's second derivative of batch norm is the formula of train mode, which has no batching rule.
    """

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = torch.rsqrt(self.running_var + self.eps)  # (C,)
        factor = factor if self.weight is None else factor * self.weight
        shift = -self.running_mean * factor
        shift = shift if self.bias is None else shift + self.bias
        shape = (-1, *[1] * (input.ndim - 2))
        return torch.addcmul(shift.view(shape), input, factor.view(shape)).to(input.dtype)


class _Trilinear(torch.autograd.Function):
    """Keeps the three arguments of T that a backward pass is made of."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.settings = inputs
        ctx.save_for_backward(*tensors)


class _Output(_Trilinear):
    """x * w."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, settings: Settings) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        stride, padding, dilation, groups = settings
        return torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        at_input = _Input.apply(slope, w, x, ctx.settings) if ctx.needs_input_grad[0] else None
        at_kernel = _Kernel.apply(slope, x, w, ctx.settings) if ctx.needs_input_grad[1] else None
        return at_input, at_kernel, None


class _Input(_Trilinear):
    """The slope at x of ⟨s, x * w⟩; `like` has x's shape."""

    @staticmethod
    def forward(s: Tensor, w: Tensor, like: Tensor, settings: Settings) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _slopes(s, like, w, settings, at_input=True)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        s, w, _ = ctx.saved_tensors
        at_slope = _Output.apply(slope, w, ctx.settings) if ctx.needs_input_grad[0] else None
        at_kernel = _Kernel.apply(s, slope, w, ctx.settings) if ctx.needs_input_grad[1] else None
        return at_slope, at_kernel, None, None


class _Kernel(_Trilinear):
    """The slope at w of ⟨s, x * w⟩; `like` has w's shape."""

    @staticmethod
    def forward(s: Tensor, x: Tensor, like: Tensor, settings: Settings) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _slopes(s, x, like, settings, at_input=False)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        s, x, _ = ctx.saved_tensors
        at_slope = _Output.apply(x, slope, ctx.settings) if ctx.needs_input_grad[0] else None
        at_input = _Input.apply(s, slope, x, ctx.settings) if ctx.needs_input_grad[1] else None
        return at_slope, at_input, None, None


def _slopes(s: Tensor, x: Tensor, w: Tensor, settings: Settings, *, at_input: bool) -> Tensor:
    stride, padding, dilation, groups = settings
    mask = [at_input, not at_input, False]
    backward = torch.ops.aten.convolution_backward(s, x, w, None, stride, padding, dilation, False, [0] * len(stride), groups, mask)
    return backward[0] if at_input else backward[1]
