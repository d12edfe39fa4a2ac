"""The gradient of a loss at given weights, as a function: by plain autograd, and in a functional form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dosimeter.interfaces import Loss
from dosimeter.network.probing import copied_buffers, forward, own_code
from dosimeter.types import NamedInputs, Refused, Update

Gradient = Callable[[Update, dict[str, Tensor], Tensor, Tensor], Update]  # at parameters and buffers, of inputs and targets


def eager_gradient(model: nn.Module, loss: Loss, create_graph: bool) -> Gradient:
    """The gradient of the mean loss by plain autograd; parameters that the loss does not reach get zeros."""

    def gradient(parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        if not create_graph:
            parameters = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        with torch.enable_grad():
            value = loss(forward(model, (parameters, buffers), inputs), targets)
            with own_code():
                slopes = torch.autograd.grad(
                    value, list(parameters.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
                )
        return {name: slope.to_dense() if slope.is_sparse else slope for name, slope in zip(parameters, slopes)}

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


def per_sample_gradients(model: nn.Module, inputs: Any, targets: Tensor, loss: Loss, wanted_by: str = "dpsgd") -> Update:
    """Each sample's own gradient by parameter name: (B, *parameter shape); differentiable in inputs and targets."""
    refuse_batch_norm(model, wanted_by)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    buffers = copied_buffers(model)

    def sample_loss(parameters: dict[str, Tensor], sample: Any, target: Tensor) -> Tensor:
        return loss(forward(model, (parameters, buffers), sample[None]), target[None])

    try:
        if isinstance(inputs, NamedInputs):
            raise RuntimeError("several tensors go through the model one sample at a time")
        return vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")(parameters, inputs, targets)
    except RuntimeError:  # the model has an operation that cannot be batched, such as a recurrent layer
        each = [grad(sample_loss)(parameters, sample, target) for sample, target in zip(inputs, targets)]
        return {name: torch.stack([gradient[name] for gradient in each]) for name in parameters}


def refuse_batch_norm(model: nn.Module, wanted_by: str) -> None:
    """Refuse a model in whose pass the samples of a batch see one another."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            mixing = f"batch norm {name!r} mixes the batch: use eval mode or group norm"
            raise Refused(f"{wanted_by} needs a gradient of each sample on its own, and {mixing}")
