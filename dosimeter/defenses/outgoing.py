"""Defenses that act on the update alone, after training and before it is sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.engines.adaptation import ScaledLayers
from dosimeter.interfaces import Client, Defense, Replay
from dosimeter.options import PositiveInt
from dosimeter.types import Distortion, Refused, Update


@dataclass(frozen=True, kw_only=True)
class OutgoingDefense(Defense):
    """Changes the update before it is sent. Such defenses act in the order in which they are listed."""

    side: ClassVar = "update"

    @abstractmethod
    def protect(self, update: Update, rng: Generator) -> Update:
        """A new update. The given tensors are not changed."""

    def __call__(self, client: Client, rng: Generator) -> Client:
        return replace(client, outgoing=(*client.outgoing, partial(self.protect, rng=rng)))


Memory = dict[str, Tensor]  # what a client keeps from one round to the next, by any names


@dataclass(frozen=True, kw_only=True)
class RememberingDefense(OutgoingDefense):
    """A defense whose message depends on earlier rounds of the same client.

    An audit sees one round. It audits a client that sends for the `rounds`th time and had the audited update in every round, as a
    client has whose batch and model hardly change. The server sees the last message, or with `averaged` the mean of all messages.
    A federated training keeps one memory for each client.
    """

    rounds: PositiveInt = 1
    averaged: bool = False

    @abstractmethod
    def send(self, update: Update, memory: Memory, rng: Generator) -> tuple[Update, Memory]:
        """One round: the message, and the memory after it. Nothing given is changed."""

    def protect(self, update: Update, rng: Generator) -> Update:
        memory: Memory = {}
        message: Update = {}
        mean: Update = {}
        for _ in range(self.rounds):
            message, memory = self.send(update, memory, rng)
            mean = {name: mean.get(name, 0) + change.to(working_dtype(change)) / self.rounds for name, change in message.items()}
        return {name: change.to(update[name].dtype) for name, change in mean.items()} if self.averaged else message


def with_noise(
    update: Update, draw: Callable[[Tensor, Generator], Tensor], rng: Generator, *, size: float, relative: bool = False, defense: str
) -> Update:
    """Every layer plus noise: `draw` times `size`, and with `relative` also times the layer's largest magnitude."""
    noisy: Update = {}
    for name, change in update.items():
        factor = size * (largest_magnitude(change) if relative else 1.0)
        noisy[name] = change + draw(change, rng) * factor
        if not torch.isfinite(noisy[name]).all() and torch.isfinite(change).all():
            raise Refused(f"{defense}: its noise on {name!r}, of size {factor:.3g}, is beyond what {change.dtype} can hold; add less")
    return noisy


ONE_VARIANCE = "one variance for all entries weighs them alike, so matching stays as it is"


def noise_replay(sent: Update, deviation: Callable[[Tensor], float], *, relative: bool) -> Replay:
    """The counter to noise: a matching attack weighs every layer by its known noise."""
    note = "every layer is weighed by the noise's known variance" if relative else ONE_VARIANCE
    return Replay(note=note, deviation={name: deviation(change) for name, change in sent.items()})


def survivors_replay(sent: Update, emptied: Callable[[Tensor], bool], later: Sequence[Defense]) -> Replay:
    """The counter to pruning: in layers that a defense `emptied`, only non-zero entries are matched."""
    if any(defense.adds_noise() for defense in later):
        return Replay(note="the noise after it fills what it emptied, so which entries survived is not known and all are matched")
    layers = {name: (change != 0).to(change) for name, change in sent.items() if emptied(change)}
    if not layers:
        return Replay(note="nothing that was sent is empty")
    survived = sum(int(change.count_nonzero()) for change in sent.values()) / max(1, sum(c.numel() for c in sent.values()))
    return Replay(note=f"only entries that survived are matched, {survived:.1%} of the update", transform=ScaledLayers(layers))


def standard_normal(like: Tensor, rng: Generator) -> Tensor:
    """Gaussian noise of the shape, dtype and device of `like`, drawn from `rng` wherever that lives."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def live_entries(change: Tensor, *, noise: float = 0.0) -> Distortion:
    """A layer whose entries were all sent, with noise of that standard deviation."""
    everywhere = torch.ones_like(change, dtype=torch.bool)
    return Distortion(noise=noise, live=everywhere, low=torch.full_like(change, -torch.inf), high=torch.full_like(change, torch.inf))


def names_of(parameters: Iterable[Tensor | None], model: nn.Module) -> set[str]:
    """The names of these parameters in an update. A parameter that layers share has the first layer's name."""
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


def own_weight(defense: str, model: nn.Module, head: str) -> str:
    """The name of the head's weight, for defenses that change this gradient alone. A shared weight is refused."""
    name, layer = f"{head}.weight" if head else "weight", model.get_submodule(head)
    weight = layer._parameters.get("weight")
    others = (other for module in model.modules() if module is not layer for other in module._parameters.values())
    if weight is None or any(other is weight for other in others):
        raise Refused(f"{defense} needs a head whose weight is its own; {name!r} is shared with another layer or made from other tensors")
    return name


def working_dtype(change: Tensor) -> torch.dtype:
    """Float32 for half precision, which lacks digits and some operations; else the tensor's own dtype."""
    return torch.promote_types(change.dtype, torch.float32)


def largest_magnitude(change: Tensor) -> float:
    return float(change.abs().max()) if change.numel() else 0.0
