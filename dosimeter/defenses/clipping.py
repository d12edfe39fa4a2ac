"""Clipping of the update by norm or by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense
from dosimeter.options import PositiveFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("clipping")
@dataclass(frozen=True, kw_only=True)
class Clipping(OutgoingDefense):
    """Shrinks the update to a norm of at most `max_norm`, or every entry to at most that size.

    Geyer, Klein & Nabi, "Differentially Private Federated Learning: A Client Level Perspective", 2017; rgla Section 5.3 (C = 4).
    `mode` "norm" scales the whole update g by min(1, max_norm / ‖g‖₂), "layer" does so for each layer on its own, and
    "value" cuts every entry to [−max_norm, max_norm].
    Departure: rgla prints the scale as max_norm / ‖g‖ without the minimum, which would enlarge a small update.
    """

    promise: ClassVar[str] = "a bound on what one client can contribute, which is the sensitivity that noise needs; no ε by itself"
    breaks: ClassVar[str] = "the size of large updates: training slows down; directions, quotients and ratios stay exact in the norm modes"

    max_norm: PositiveFloat
    mode: Literal["norm", "layer", "value"] = "norm"

    def protect(self, update: Update, rng: Generator) -> Update:
        if math.isinf(self.max_norm) or not update:
            return dict(update)
        if self.mode == "value":
            return {name: change.clamp(-self.max_norm, self.max_norm) for name, change in update.items()}
        norms = torch.stack([_norm(change) for change in update.values()])  # (layers,)
        if self.mode == "norm":
            norms = torch.linalg.vector_norm(norms).expand(len(update))
        scales = (self.max_norm / norms).tolist()
        return {name: change * scale if scale < 1 else change for (name, change), scale in zip(update.items(), scales)}


def _norm(change: Tensor) -> Tensor:
    """In float64, so that float16 and large float32 entries do not overflow when squared."""
    return torch.linalg.vector_norm(change, dtype=torch.float64)
