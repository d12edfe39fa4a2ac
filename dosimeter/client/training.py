"""What a client computes from its batch: a gradient (FedSGD) or several local steps (FedAvg)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Loss, Public, Training
from dosimeter.network.probing import copied_buffers, forward
from dosimeter.options import Fraction, PositiveFloat, PositiveInt
from dosimeter.registry import TRAININGS
from dosimeter.types import Refused, Update

MOST_STEPS = 10**6  # of a client in one round; more take days
Gradient = Callable[[Update, dict[str, Tensor], Tensor, Tensor], Update]  # at parameters and buffers, of inputs and targets


@dataclass(frozen=True, kw_only=True)
class Replayable(Training):
    """A training written in terms of a gradient function, so that attacks can replay it with a compiled gradient too."""

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        update = self.replay(eager_gradient(model, loss, create_graph), leaves(model), copied_buffers(model), inputs, targets)
        return update if create_graph else {name: change.detach() for name, change in update.items()}

    @abstractmethod
    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        """The update of `parameters`, in units of a gradient; `buffers` are the caller's copies and may be written to."""


@TRAININGS.register("fedsgd")
@dataclass(frozen=True, kw_only=True)
class FedSGD(Replayable):
    """Sends the gradient of the mean loss over the batch.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017: FedSGD.
    """

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        return gradient(parameters, buffers, inputs, targets)

    def gain(self, batch_size: int | None) -> float:
        return 1.0

    def sample_term(self, gradient: Update) -> Update:
        return gradient


@TRAININGS.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Replayable):
    """Trains locally for several steps and sends what changed.

    McMahan et al., AISTATS 2017: Algorithm 1, ClientUpdate. The client passes `epochs` times over its batch in
    mini-batches of `mini_batch` samples, in order. Where `steps` is given, it trains for that many steps instead.
    Departure: the change of the weights is divided by −learning_rate × steps, which the server knows. An update then has
    the units of a gradient, and one plain step gives FedSGD's update. What momentum adds stays in: see `gain`.
    """

    learning_rate: PositiveFloat = 0.01
    steps: PositiveInt | None = None
    epochs: PositiveInt = 1
    mini_batch: PositiveInt | None = None
    momentum: Fraction = 0.0

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        weights, velocity = dict(parameters), {}
        for piece in self.pieces(len(inputs)):
            slope = gradient(weights, buffers, inputs[piece], targets[piece])
            velocity = {name: self.momentum * velocity[name] + g if velocity else g for name, g in slope.items()}
            weights = {name: weights[name] - self.learning_rate * v for name, v in velocity.items()}
        scale = 1 / self.unit(len(inputs))
        return {name: (parameters[name] - weights[name]) * scale for name in velocity}

    def pieces(self, batch_size: int) -> list[slice]:
        """The mini-batches in the order in which they are trained on."""
        size = min(self.mini_batch or batch_size, batch_size)
        steps = self.steps or self.epochs * -(-batch_size // size)
        if steps > MOST_STEPS:
            raise ValueError(f"training: expected at most {MOST_STEPS} local steps, got {steps}")
        epoch = [slice(first, min(first + size, batch_size)) for first in range(0, batch_size, size)]
        if self.steps is None:
            return epoch * self.epochs
        return [epoch[step % len(epoch)] for step in range(self.steps)]

    def local_steps(self, batch_size: int | None) -> int:
        if self.steps is not None:
            return self.steps
        if batch_size is None and self.mini_batch is not None:
            raise Refused("training: the number of steps follows from the batch size; pass batch_size, or steps in place of epochs")
        return self.epochs * math.ceil((batch_size or 1) / (self.mini_batch or batch_size or 1))

    def unit(self, batch_size: int | None) -> float:
        return self.learning_rate * self.local_steps(batch_size)

    def gain(self, batch_size: int | None) -> float:
        """(1/n) Σ_j (n − j) μ^j over n steps: with momentum μ, a gradient enters the velocity of all steps after its own."""
        if self.momentum == 0:
            return 1.0
        steps, rest = self.local_steps(batch_size), 1 - self.momentum
        if rest == 0:
            return (steps + 1) / 2
        return 1 / rest - self.momentum * (1 - self.momentum**steps) / (steps * rest**2)


@dataclass(frozen=True, kw_only=True)
class MeanOfClients(Replayable):
    """The mean of the updates that clients compute on their shares of the batch, weighted by the shares' sizes."""

    name: ClassVar[str] = "mean_of_clients"

    clients: PositiveInt
    each: Replayable
    sizes: tuple[PositiveInt, ...] | None = None  # of the shares, in the order of the batch; None: as equal as possible

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        total: Update = {}
        everything = torch.arange(len(targets), device=targets.device)
        equal = self.sizes is None or sum(self.sizes) != len(targets)  # guesses of another number than the clients have
        for chosen in torch.tensor_split(everything, self.clients) if equal else everything.split(list(self.sizes or ())):
            share, wanted = inputs[chosen], targets[chosen]
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            update = self.each.replay(gradient, parameters, own, share, wanted)
            weight = len(share) / len(inputs)
            total = {name: total[name] + change * weight if total else change * weight for name, change in update.items()}
        return total

    def local_steps(self, batch_size: int | None) -> int:
        return self.each.local_steps(self._largest_share(batch_size))

    def unit(self, batch_size: int | None) -> float:
        return self.each.unit(self._largest_share(batch_size))

    def gain(self, batch_size: int | None) -> float | None:
        return self.each.gain(self._largest_share(batch_size))

    def _largest_share(self, batch_size: int | None) -> int | None:
        if self.sizes is not None:
            return max(self.sizes)
        return None if batch_size is None else math.ceil(batch_size / self.clients)


def sends_one_gradient(training: Training) -> bool:
    """Whether the update is one gradient of one batch. Several local steps add gradients at different weights."""
    return isinstance(training, FedSGD) or (
        isinstance(training, FedAvg) and training.steps in (None, 1) and training.epochs == 1 and training.mini_batch is None
    )


def sends_mean_gradient(public: Public) -> bool:
    """Whether the update is one gradient of one batch. The mean of several clients' gradients is that of all their samples.

    In train mode batch norm mixes the samples of each client alone, so that clients together are no large batch.
    """
    training = public.training
    several = isinstance(training, MeanOfClients) and not public.train_mode
    return sends_one_gradient(training.each if several and isinstance(training, MeanOfClients) else training)


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
