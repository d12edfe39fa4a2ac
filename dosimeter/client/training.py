"""What a client computes from its batch: a gradient (FedSGD) or several local steps (FedAvg)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dosimeter.client.gradients import Gradient, eager_gradient, leaves
from dosimeter.client.optimisers import (
    State,
    Step,
    build,
    check_arguments,
    farthest,
    linear_response,
    optimiser_named,
    replayed_step,
    sums_gradients,
    weight_decay_of,
)
from dosimeter.interfaces import Loss, Public, Training
from dosimeter.network.per_client import of_client
from dosimeter.network.probing import copied_buffers, forward
from dosimeter.options import FiniteFloat, Fraction, PositiveFloat, PositiveInt
from dosimeter.registry import TRAININGS
from dosimeter.types import Refused, Update

MOST_STEPS = 10**6  # of a client in one round; more take days
CLIP_MARGIN = 1e-6  # that torch adds to a norm before it divides by it


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

    McMahan et al., AISTATS 2017: Algorithm 1, ClientUpdate. The client passes `epochs` times over its batch in mini-batches of
    `mini_batch` samples. Where `steps` is given, it trains for that many steps instead. With `shuffle` each epoch has an order of its
    own, drawn from the client's secret stream; a replay then takes the guesses in their own order. A step is one of `torch.optim`'s
    `optimizer`, new in each round, on the mean gradient of `accumulate` mini-batches, or of what an epoch has left. `proximal` is μ of
    FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020: Eq. (2)). `max_norm` clips each step's gradient.
    `frozen` names layers or parameters that stay. `autocast` computes losses in half precision.
    Departure: the change of the weights is divided by −learning_rate × steps, which the server knows, after what weight decay alone does
    to them is taken away: see `decay`. An update then has the units of a gradient, and one plain step gives FedSGD's update. What momentum
    adds stays in: see `gain`. The update of an optimiser that divides by the gradients' sizes is no gradient: see `preconditioning`.
    """

    learning_rate: PositiveFloat = 0.01
    steps: PositiveInt | None = None
    epochs: PositiveInt = 1
    mini_batch: PositiveInt | None = None
    momentum: Fraction = 0.0
    optimizer: str = "sgd"
    weight_decay: FiniteFloat | None = None  # None: the optimiser's default
    optimizer_options: dict[str, Any] | None = None  # further arguments of the optimiser, such as betas or nesterov
    shuffle: bool = False
    accumulate: PositiveInt = 1
    max_norm: PositiveFloat | None = None
    proximal: FiniteFloat = 0.0
    frozen: tuple[str, ...] = ()
    autocast: Literal["bfloat16"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_arguments(self.optimizer, self.arguments)

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        if create_graph:
            return super().__call__(model, inputs, targets, loss, create_graph)
        before, buffers = leaves(model), copied_buffers(model)
        weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in before.items()}
        chosen = {name: weights[name] for name in self.trained(weights)}
        optimiser = build(self.optimizer, list(chosen.values()), self.learning_rate, self.arguments)
        with torch.enable_grad():
            for order, group in self._orders(len(inputs)):
                optimiser.zero_grad()
                for piece in group:
                    samples = order[piece].to(targets.device)
                    with self._casting(targets.device):
                        value = loss(forward(model, (weights, buffers), inputs[samples]), targets[samples])
                    (value / len(group)).backward(inputs=list(chosen.values()))
                if self.proximal:
                    for name, weight in chosen.items():
                        pull = self.proximal * (weight.detach() - before[name].detach())
                        weight.grad = pull if weight.grad is None else weight.grad + pull
                if self.max_norm is not None:
                    nn.utils.clip_grad_norm_(chosen.values(), self.max_norm)
                optimiser.step()
        return {name: change.detach() for name, change in self._in_units(before, weights, tuple(chosen), len(inputs)).items()}

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        return self.replay_on(gradient, parameters, buffers, inputs, targets, self.groups(len(inputs)), len(inputs))

    def replay_on(
        self,
        gradient: Gradient,
        parameters: Update,
        buffers: dict[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        groups: Sequence[tuple[slice, ...]],
        batch_size: int,
    ) -> Update:
        """The update of a client with `batch_size` samples whose steps take these mini-batches of `inputs`."""
        step, names = self.step(), self.trained(parameters)
        weights: Update = dict(parameters)
        states: dict[str, State] = {name: {} for name in names}
        for group in groups:
            slope: Update = {}
            for piece in group:
                with self._casting(targets.device):
                    part = gradient(weights, buffers, inputs[piece], targets[piece])
                slope = {name: slope[name] + part[name] / len(group) if slope else part[name] / len(group) for name in names}
            if self.proximal:
                slope = {name: g + self.proximal * (weights[name] - parameters[name]) for name, g in slope.items()}
            if self.max_norm is not None:
                slope = _clipped(slope, self.max_norm)
            for name, g in slope.items():
                weights[name], states[name] = step(weights[name], g, states[name])
        return self._in_units(parameters, weights, names, batch_size)

    def of_samples(self, batch_size: int | None) -> FedAvg:
        """The same training of so many samples: mini-batches that hold all of them are none."""
        whole = self.mini_batch is not None and batch_size is not None and batch_size <= self.mini_batch
        return replace(self, mini_batch=None) if whole else self

    def step(self) -> Step:
        """One step of the optimiser as a function of stateless tensors; refused where there is no rule."""
        return replayed_step(self.optimizer, self.learning_rate, self.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the optimiser is built with, beside the learning rate."""
        named = {"momentum": self.momentum or None, "weight_decay": self.weight_decay}
        return {name: value for name, value in named.items() if value is not None} | (self.optimizer_options or {})

    def trained(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names of parameters that move: all but those of frozen layers."""
        names = tuple(names)
        for layer in self.frozen:
            if not any(_lies_in(name, layer) for name in names):
                raise ValueError(f"training.frozen: the model trains no parameter or layer {layer!r}")
        kept = tuple(name for name in names if not self.freezes(name))
        if not kept:
            raise ValueError("training.frozen: expected a layer that is left to train, got all of them")
        return kept

    def freezes(self, name: str) -> bool:
        """Whether this parameter lies in a layer that the client does not train."""
        return any(_lies_in(name, layer) for layer in self.frozen)

    def groups(self, batch_size: int) -> list[tuple[slice, ...]]:
        """The mini-batches of each step, in order."""
        size = min(self.mini_batch or batch_size, batch_size)
        a_epoch = math.ceil(math.ceil(batch_size / size) / self.accumulate)
        steps = self.steps or self.epochs * a_epoch
        if steps > MOST_STEPS:
            raise ValueError(f"training: expected at most {MOST_STEPS} local steps, got {steps}")
        pieces = [slice(first, min(first + size, batch_size)) for first in range(0, batch_size, size)]
        epoch = [tuple(pieces[first : first + self.accumulate]) for first in range(0, len(pieces), self.accumulate)]
        return [epoch[step % len(epoch)] for step in range(steps)]

    def pieces(self, batch_size: int) -> list[slice]:
        """The mini-batches in the order in which they are trained on."""
        return [piece for group in self.groups(batch_size) for piece in group]

    def visits(self, batch_size: int) -> tuple[Tensor, list[tuple[slice, ...]]]:
        """The samples as all steps take them, one after the other, and the mini-batches of each step. A shuffling client draws."""
        taken, groups, first = [], [], 0
        for order, group in self._orders(batch_size):
            lengths = [piece.stop - piece.start for piece in group]
            ends = [first + sum(lengths[: place + 1]) for place in range(len(lengths))]
            groups.append(tuple(slice(end - length, end) for end, length in zip(ends, lengths)))
            taken.extend(order[piece] for piece in group)
            first = ends[-1]
        return torch.cat(taken), groups

    def is_ordered(self, batch_size: int | None) -> bool:
        """Whether a replay takes the samples in the client's order, as far as the order matters."""
        return not self.shuffle or (batch_size is not None and batch_size <= (self.mini_batch or batch_size))

    def local_steps(self, batch_size: int | None) -> int:
        if self.steps is not None:
            return self.steps
        if batch_size is None and self.mini_batch is not None:
            raise Refused("training: the number of steps follows from the batch size; pass batch_size, or steps in place of epochs")
        pieces = math.ceil((batch_size or 1) / (self.mini_batch or batch_size or 1))
        return self.epochs * math.ceil(pieces / self.accumulate)

    def local_batches(self, batch_size: int | None) -> int | None:
        if self.accumulate == 1 or self.mini_batch is None:
            return self.local_steps(batch_size)
        return None if batch_size is None else len(self.pieces(batch_size))

    def largest_entry(self, batch_size: int | None) -> float:
        steps = self.local_steps(batch_size)
        return farthest(self.optimizer, self.arguments, steps) / steps

    def largest_norm(self, batch_size: int | None) -> float:
        if self.max_norm is None or self.preconditioning():
            return math.inf
        _, moved = linear_response(self.step(), self.local_steps(batch_size), 0.0)  # FedProx's pull is clipped with the gradient
        return -self.max_norm * moved / self.unit(batch_size)

    def unit(self, batch_size: int | None) -> float:
        return self.learning_rate * self.local_steps(batch_size)

    def gain(self, batch_size: int | None) -> float | None:
        """What gradients of 1 in every step move the weights by, in learning rates a step: with momentum, each enters all later steps."""
        if self.preconditioning():
            return None
        if not self.arguments and not self.proximal:
            return 1.0
        return -self._response(batch_size)[1] / self.unit(batch_size)

    def decay(self, batch_size: int | None) -> float:
        if not self.preconditioning():
            return self._response(batch_size)[0] if self.decays else 1.0
        if optimiser_named(self.optimizer) is torch.optim.AdamW:
            return (1 - self.learning_rate * weight_decay_of(self.optimizer, self.arguments)) ** self.local_steps(batch_size)
        return 1.0  # decay inside a gradient that is then divided by its own size cannot be taken away

    @property
    def decays(self) -> bool:
        """Whether weights move without a gradient."""
        return weight_decay_of(self.optimizer, self.arguments) > 0

    def preconditioning(self) -> str:
        if sums_gradients(self.optimizer) and not self.arguments.get("maximize"):
            return ""
        return (
            f"{optimiser_named(self.optimizer).__name__} divides each step by the gradients' own sizes, so that no sum of gradients is sent"
        )

    @property
    def is_plain(self) -> bool:
        """Whether a single step subtracts the gradient times the learning rate, in full precision, and nothing else."""
        unusual = (self.optimizer_options, self.weight_decay, self.max_norm, self.autocast, self.accumulate > 1, self.preconditioning())
        return not any(unusual)

    def _response(self, batch_size: int | None) -> tuple[float, float]:
        return linear_response(self.step(), self.local_steps(batch_size), self.proximal)

    def _orders(self, batch_size: int) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """The order of the samples at each step, and the mini-batches in it. A shuffling client draws a new order for each epoch."""
        order = torch.arange(batch_size)
        for group in self.groups(batch_size):
            if self.shuffle and group[0].start == 0:
                order = torch.randperm(batch_size)
            yield order, group

    def _casting(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, torch.bfloat16)

    def _in_units(self, before: Update, after: Update, names: Sequence[str], batch_size: int) -> Update:
        """(decay · before − after) / (learning rate × steps). A layer that the loss does not reach does not decay either."""
        scale, lost = 1 / self.unit(batch_size), 1 - self.decay(batch_size)
        changes = {name: before[name] - after[name] for name in names}
        if lost:
            changes = {name: change - lost * before[name] * change.detach().any() for name, change in changes.items()}
        return {name: change * scale for name, change in changes.items()}


@dataclass(frozen=True, kw_only=True)
class MeanOfClients(Replayable):
    """The mean of the updates that clients compute on their shares of the batch, weighted by the shares' sizes.

    A dishonest server may send each client a model of its own (`SentPerClient`). Attacks replay the mean at one model.
    """

    name: ClassVar[str] = "mean_of_clients"

    clients: PositiveInt
    each: Replayable
    sizes: tuple[PositiveInt, ...] | None = None  # of the shares, in the order of the batch; None: as equal as possible

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        if create_graph:
            return super().__call__(model, inputs, targets, loss, create_graph)
        return self._mean(inputs, targets, lambda number, share, wanted: self.each(of_client(model, number), share, wanted, loss))

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        def update_of(number: int, share: Tensor, wanted: Tensor) -> Update:
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            return self.each.replay(gradient, parameters, own, share, wanted)

        return self._mean(inputs, targets, update_of)

    def _mean(self, inputs: Tensor, targets: Tensor, update_of: Callable[[int, Tensor, Tensor], Update]) -> Update:
        total: Update = {}
        everything = torch.arange(len(targets), device=targets.device)
        equal = self.sizes is None or sum(self.sizes) != len(targets)  # guesses of another number than the clients have
        shares = torch.tensor_split(everything, self.clients) if equal else everything.split(list(self.sizes or ()))
        for number, chosen in enumerate(shares):
            update, weight = update_of(number, inputs[chosen], targets[chosen]), len(chosen) / len(inputs)
            total = {name: total[name] + change * weight if total else change * weight for name, change in update.items()}
        return total

    def local_steps(self, batch_size: int | None) -> int:
        return self.each.local_steps(self._largest_share(batch_size))

    def local_batches(self, batch_size: int | None) -> int | None:
        return self.each.local_batches(self._largest_share(batch_size))

    def largest_entry(self, batch_size: int | None) -> float:
        return self.each.largest_entry(self._largest_share(batch_size))

    def largest_norm(self, batch_size: int | None) -> float:
        return self.each.largest_norm(self._largest_share(batch_size))

    def unit(self, batch_size: int | None) -> float:
        return self.each.unit(self._largest_share(batch_size))

    def gain(self, batch_size: int | None) -> float | None:
        return self.each.gain(self._largest_share(batch_size))

    def decay(self, batch_size: int | None) -> float:
        return self.each.decay(self._largest_share(batch_size))

    def preconditioning(self) -> str:
        return self.each.preconditioning()

    def _largest_share(self, batch_size: int | None) -> int | None:
        if self.sizes is not None:
            return max(self.sizes)
        return None if batch_size is None else math.ceil(batch_size / self.clients)


def sends_one_gradient(training: Training) -> bool:
    """Whether the update is one gradient of one batch. Several local steps add gradients at different weights."""
    return isinstance(training, FedSGD) or (
        isinstance(training, FedAvg)
        and training.is_plain
        and training.steps in (None, 1)
        and training.epochs == 1
        and training.mini_batch is None
    )


def sends_mean_gradient(public: Public) -> bool:
    """Whether the update is one gradient of one batch. The mean of several clients' gradients is that of all their samples.

    In train mode batch norm mixes the samples of each client alone, so that clients together are no large batch.
    """
    training = public.training
    several = isinstance(training, MeanOfClients) and not public.train_mode
    return sends_one_gradient(training.each if several and isinstance(training, MeanOfClients) else training)


def _clipped(slope: Update, max_norm: float) -> Update:
    """The gradient as `torch.nn.utils.clip_grad_norm_` leaves it."""
    norm = torch.stack([g.norm() for g in slope.values()]).norm()
    factor = (max_norm / (norm + CLIP_MARGIN)).clamp(max=1.0)
    return {name: g * factor for name, g in slope.items()}


def _lies_in(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")
