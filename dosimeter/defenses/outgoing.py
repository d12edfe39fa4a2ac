"""Defenses that act on the update alone, after training and before it is sent."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.interfaces import Defense
from dosimeter.types import Client, Update


@dataclass(frozen=True, kw_only=True)
class OutgoingDefense(Defense):
    """Changes what is sent; the client's outgoing transforms run in the order in which their defenses are listed."""

    side: ClassVar = "update"

    @abstractmethod
    def protect(self, update: Update, rng: Generator) -> Update:
        """A new update; the tensors of the given one stay as they are."""

    def __call__(self, client: Client, rng: Generator) -> Client:
        return replace(client, outgoing=(*client.outgoing, partial(self.protect, rng=rng)))


def standard_normal(like: Tensor, rng: Generator) -> Tensor:
    """Gaussian noise of the shape, dtype and device of `like`, drawn from `rng` wherever that lives."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def working_dtype(change: Tensor) -> torch.dtype:
    """Float32 for half precision, which lacks the digits and some of the operations; else the tensor's own."""
    return torch.promote_types(change.dtype, torch.float32)


def largest_magnitude(change: Tensor) -> float:
    return float(change.abs().max()) if change.numel() else 0.0
