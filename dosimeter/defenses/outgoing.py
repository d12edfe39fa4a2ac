"""Defenses that act on the update alone, after training and before it is sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.interfaces import Client, Defense
from dosimeter.types import Refused, Update


@dataclass(frozen=True, kw_only=True)
class OutgoingDefense(Defense):
    """Changes what is sent; the client's outgoing transforms run in the order in which their defenses are listed."""

    side: ClassVar = "update"

    @abstractmethod
    def protect(self, update: Update, rng: Generator) -> Update:
        """A new update; the tensors of the given one stay as they are."""

    def __call__(self, client: Client, rng: Generator) -> Client:
        return replace(client, outgoing=(*client.outgoing, partial(self.protect, rng=rng)))


def with_noise(
    update: Update, draw: Callable[[Tensor, Generator], Tensor], rng: Generator, *, size: float, relative: bool = False, defense: str
) -> Update:
    """Every layer plus `size` times what `draw` gives for it, and times its largest magnitude with `relative`."""
    noisy: Update = {}
    for name, change in update.items():
        factor = size * (largest_magnitude(change) if relative else 1.0)
        noisy[name] = change + draw(change, rng) * factor
        if not torch.isfinite(noisy[name]).all() and torch.isfinite(change).all():
            raise Refused(f"{defense}: its noise on {name!r}, of size {factor:.3g}, is beyond what {change.dtype} can hold; add less")
    return noisy


def standard_normal(like: Tensor, rng: Generator) -> Tensor:
    """Gaussian noise of the shape, dtype and device of `like`, drawn from `rng` wherever that lives."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def names_of(parameters: Iterable[Tensor | None], model: nn.Module) -> set[str]:
    """The names under which an update has these parameters: where layers share one, it goes by the first layer's name."""
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


def own_weight(defense: str, model: nn.Module, head: str) -> str:
    """The name of the head's weight, for defenses that change its gradient and no other layer's; a shared weight is refused."""
    name, layer = f"{head}.weight" if head else "weight", model.get_submodule(head)
    weight = layer._parameters.get("weight")
    others = (other for module in model.modules() if module is not layer for other in module._parameters.values())
    if weight is None or any(other is weight for other in others):
        raise Refused(f"{defense} needs a head whose weight is its own; {name!r} is shared with another layer or made from other tensors")
    return name


def working_dtype(change: Tensor) -> torch.dtype:
    """Float32 for half precision, which lacks the digits and some of the operations; else the tensor's own."""
    return torch.promote_types(change.dtype, torch.float32)


def largest_magnitude(change: Tensor) -> float:
    return float(change.abs().max()) if change.numel() else 0.0
