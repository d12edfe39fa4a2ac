"""Clipping of the update by norm or by value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, live_entries, working_dtype
from dosimeter.interfaces import Attack, Defense, Public, Replay
from dosimeter.options import PositiveFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Distortion, Encoding, Update

CLIPPED_ROUNDING = 1e-2  # relative distance of a clipped norm from its bound, in half precision


@DEFENSES.register("clipping")
@dataclass(frozen=True, kw_only=True)
class Clipping(OutgoingDefense):
    """Shrinks the update to a norm of at most `max_norm`, or every entry to at most that size.

    Geyer, Klein & Nabi, "Differentially Private Federated Learning: A Client Level Perspective", 2017; rgla Section 5.3 (C = 4).
    `mode` "norm" scales the whole update g by min(1, max_norm / ‖g‖₂), "layer" does so for each layer on its own, and
    "value" cuts every entry to [−max_norm, max_norm].
    Departure: rgla prints the scale as max_norm / ‖g‖ without the minimum, which would enlarge a small update.
    """

    continuous: ClassVar[bool] = True
    promise: ClassVar[str] = "a bound on what one client can contribute, which is the sensitivity that noise needs; no ε by itself"
    breaks: ClassVar[str] = "the size of large updates: training slows down; directions, quotients and ratios stay exact in the norm modes"
    strengths: ClassVar = ({"max_norm": 1.0}, {"max_norm": 0.1})

    max_norm: PositiveFloat
    mode: Literal["norm", "layer", "value"] = "norm"

    def distorts(self) -> bool:
        return self.mode == "value" and self.max_norm < math.inf

    def protect(self, update: Update, rng: Generator) -> Update:
        return dict(update) if math.isinf(self.max_norm) or not update else self.clip(update)

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        """An entry at the bound was at least as large."""
        whole, at_bound = live_entries(change), change.abs() >= self.max_norm
        return replace(
            whole,
            live=~at_bound,
            low=torch.where(at_bound & (change > 0), self.max_norm, whole.low),
            high=torch.where(at_bound & (change < 0), -self.max_norm, whole.high),
        )

    def scaling(self) -> Literal["update", "layers", "unknown"]:
        return "update" if self.mode == "norm" else "layers" if self.mode == "layer" else "unknown"

    def unscaled(self, sent: Update) -> frozenset[str]:
        """Clipping leaves a norm of `max_norm`. So a smaller norm was not clipped."""
        if self.mode == "value":
            return frozenset()
        norms = {name: float(norm(change)) for name, change in sent.items()}
        if self.mode == "norm":
            norms = dict.fromkeys(norms, math.hypot(*norms.values()))
        return frozenset(name for name, size in norms.items() if size < (1 - CLIPPED_ROUNDING) * self.max_norm)

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        if self.mode == "norm" and attack.matches == "direction":
            return Replay(note="matching directions does not see a common scale")
        return Replay(note="the clipping is replayed on the guess", transform=self.clip)

    def clip(self, update: Update) -> Update:
        """The clipped update, differentiable in the update and in the clipping factor."""
        if self.mode == "value":
            return {name: clamp_entries(change, self.max_norm) for name, change in update.items()}
        norms = {name: norm(change) for name, change in update.items()}
        if self.mode == "norm":
            norms = dict.fromkeys(norms, norm(torch.stack(list(norms.values()))))
        return {name: _scaled(change, clip_factor(norms[name], self.max_norm)) for name, change in update.items()}

    def norm_bound(self) -> float:
        return self.max_norm if self.mode == "norm" else math.inf

    def encoding(self, before: Encoding) -> Encoding:
        return replace(before, bits=None, rank=None) if self.mode == "value" else before


def _scaled(change: Tensor, factor: Tensor) -> Tensor:
    """The product, formed in float32 for half precision, which would round the factor."""
    exact = change.to(working_dtype(change))
    return (exact * factor.to(exact)).to(change.dtype)


def clamp_entries(change: Tensor, bound: float) -> Tensor:
    """Every entry clamped to ±bound, also where the tensor's dtype cannot hold the bound."""
    reach = min(bound, torch.finfo(change.dtype).max)
    return change.clamp(-reach, reach)


def norm(change: Tensor, dim: int | None = None) -> Tensor:
    """The L2 norm in float64, so that float16 and large float32 entries do not overflow when squared."""
    return torch.linalg.vector_norm(change, dim=dim, dtype=torch.float64)


def clip_factor(norms: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm). Its slope is finite at a norm of zero, so that attacks can differentiate it."""
    return (norms / max_norm).clamp_min(1).reciprocal()
