"""Noise on one row of the head's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.laplace_noise import standard_laplace
from dosimeter.defenses.outgoing import live_entries, standard_normal
from dosimeter.interfaces import Client, Defense, Public
from dosimeter.network.head import locate_head
from dosimeter.options import NonNegativeFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Distortion, Update


@DEFENSES.register("head_row_noise")
@dataclass(frozen=True, kw_only=True)
class HeadRowNoise(Defense):
    """Adds noise to the one row of the head's weight gradient that has the largest sum in magnitude.

    Wang et al., "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: the noise study of Section 5.2, as
    the released code has it. The printed variance is the standard deviation `std`; a Laplace distribution has the scale std/√2.
    This is a study of one recovery and no defense that anyone should use: all other rows tell the same feature.
    """

    side: ClassVar = "update"
    promise: ClassVar[str] = "nothing: every other row of the head's gradient is sent as it is"
    breaks: ClassVar[str] = "the training of one class's row"

    std: NonNegativeFloat
    shape: Literal["gaussian", "laplace"] = "gaussian"

    def distorts(self) -> bool:
        return self.std > 0

    def adds_noise(self) -> bool:
        return self.std > 0

    def scaling(self) -> Literal["none"]:
        return "none"

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        return live_entries(change, noise=self.std)

    def __call__(self, client: Client, rng: Generator) -> Client:
        head, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        name = f"{head}.weight" if head else "weight"

        def with_a_noisy_row(update: Update) -> Update:
            return {**update, name: self._noisy(update[name], rng)} if name in update else dict(update)

        return replace(client, outgoing=(*client.outgoing, with_a_noisy_row))

    def _noisy(self, change: Tensor, rng: Generator) -> Tensor:
        if self.std == 0:
            return change
        row = int(change.flatten(1).sum(1).abs().argmax())
        drawn = standard_normal(change[row], rng) if self.shape == "gaussian" else standard_laplace(change[row], rng) / math.sqrt(2)
        mask = torch.zeros(len(change), *[1] * (change.ndim - 1), dtype=change.dtype, device=change.device)
        mask[row] = self.std
        return change + mask * drawn
