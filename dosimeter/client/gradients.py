"""The gradient of a loss at given weights, as a function: by plain autograd, and in a functional form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Loss
from dosimeter.network.probing import forward
from dosimeter.types import Update

Gradient = Callable[[Update, dict[str, Tensor], Tensor, Tensor], Update]  # at parameters and buffers, of inputs and targets


def eager_gradient(model: nn.Module, loss: Loss, create_graph: bool) -> Gradient:
    """The gradient of the mean loss by plain autograd; parameters that the loss does not reach get zeros."""

    def gradient(parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        if not create_graph:
            parameters = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        with torch.enable_grad():
            value = loss(forward(model, (parameters, buffers), inputs), targets)
            slopes = torch.autograd.grad(
                value, list(parameters.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
        return dict(zip(parameters, slopes))

    return gradient


def functional_gradient(model: nn.Module, loss: Loss) -> Gradient:
    """The same gradient as a pure function by `torch.func.grad`, which can be transformed and compiled."""

    def gradient(parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        def value(at: Update) -> tuple[Tensor, dict[str, Tensor]]:
            written = {name: buffer.clone() for name, buffer in buffers.items()}
            return loss(forward(model, (at, written), inputs), targets), written

        slopes, written = torch.func.grad(value, has_aux=True)(parameters)
        buffers.update(written)
        return slopes

    return gradient


def leaves(model: nn.Module) -> Update:
    """The trainable parameters as new leaves, so that the model's own requires_grad and .grad stay as they are."""
    return {name: p.detach().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
