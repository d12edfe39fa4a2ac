"""What a client computes from its batch: a gradient (FedSGD) or several local steps (FedAvg)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dosimeter.interfaces import Loss, Training
from dosimeter.options import Fraction, PositiveFloat, PositiveInt
from dosimeter.registry import TRAININGS
from dosimeter.types import Update


@TRAININGS.register("fedsgd")
@dataclass(frozen=True, kw_only=True)
class FedSGD(Training):
    """Sends the gradient of the mean loss over the batch.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017: FedSGD.
    """

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        parameters = _leaves(model)
        return _gradient(model, parameters, _copied_buffers(model), inputs, targets, loss, create_graph)


@TRAININGS.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Training):
    """Trains locally for several steps and sends what changed.

    McMahan et al., AISTATS 2017: Algorithm 1, ClientUpdate. The client passes `epochs` times over its batch in
    `mini_batch` pieces, in order, repeating until `steps` steps are done where `steps` is given.
    Departure: the change of the weights is divided by −learning_rate × steps, numbers the server knows, so that
    an update always has a gradient's units, and one plain step gives FedSGD's update.
    """

    learning_rate: PositiveFloat = 0.01
    steps: PositiveInt | None = None
    epochs: PositiveInt = 1
    mini_batch: PositiveInt | None = None
    momentum: Fraction = 0.0

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        start = _leaves(model)
        buffers = _copied_buffers(model)
        weights, velocity = dict(start), {}
        pieces = self.pieces(len(inputs))
        for piece in pieces:
            gradient = _gradient(model, weights, buffers, inputs[piece], targets[piece], loss, create_graph)
            velocity = {name: self.momentum * velocity[name] + g if velocity else g for name, g in gradient.items()}
            weights = weights | {name: weights[name] - self.learning_rate * v for name, v in velocity.items()}
            if not create_graph:
                weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        scale = 1 / (self.learning_rate * len(pieces))
        update = {name: (start[name] - weights[name]) * scale for name in velocity}
        return update if create_graph else {name: change.detach() for name, change in update.items()}

    def pieces(self, batch_size: int) -> list[slice]:
        """The mini-batches in the order in which they are trained on."""
        size = min(self.mini_batch or batch_size, batch_size)
        epoch = [slice(first, min(first + size, batch_size)) for first in range(0, batch_size, size)]
        if self.steps is None:
            return epoch * self.epochs
        return [epoch[step % len(epoch)] for step in range(self.steps)]


def _gradient(
    model: nn.Module,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    create_graph: bool,
) -> Update:
    """The gradient of the mean loss at `parameters`, by name; parameters that the loss does not reach get zeros."""
    with torch.enable_grad():
        value = loss(functional_call(model, (parameters, buffers), (inputs,)), targets)
        gradients = torch.autograd.grad(
            value, list(parameters.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    return dict(zip(parameters, gradients))


def _leaves(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters as fresh leaves, so that no caller's requires_grad or .grad is touched."""
    return {name: p.detach().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}


def _copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies, since batch norm in train mode writes into its running statistics."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
