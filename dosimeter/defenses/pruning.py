"""Magnitude pruning of the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense
from dosimeter.options import Fraction
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("pruning")
@dataclass(frozen=True, kw_only=True)
class Pruning(OutgoingDefense):
    """Sets the smallest entries of the update to zero.

    Zhu, Liu & Han, "Deep Leakage from Gradients", NeurIPS 2019, after Lin et al., "Deep Gradient Compression", ICLR 2018;
    rgla Section 5.3 (80 % to 99.9 %), ilrg Appendix G, thesis Section 4.5.5.
    Of n entries exactly ⌊ratio · n⌋ are zeroed, the smallest magnitudes first, ties in no particular order: of each layer,
    or of the update as a whole with `scope` "update".
    Departure: nothing is kept back for the next round (Lin et al. accumulate what they prune), since one round is audited.
    """

    promise: ClassVar[str] = "nothing: the surviving entries are exact"
    breaks: ClassVar[str] = "small gradients are lost for good without error accumulation; accuracy suffers above about 99 %"

    ratio: Fraction
    scope: Literal["layer", "update"] = "layer"

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.ratio == 0 or not update:
            return dict(update)
        if self.scope == "layer":
            return {name: change.masked_fill(_smallest(change.abs(), self.ratio), 0) for name, change in update.items()}
        magnitudes = torch.cat([change.abs().flatten().double() for change in update.values()])
        masks = _smallest(magnitudes, self.ratio).split([change.numel() for change in update.values()])
        return {name: change.masked_fill(mask.view_as(change), 0) for (name, change), mask in zip(update.items(), masks)}


def _smallest(magnitudes: Tensor, ratio: float) -> Tensor:
    """Where the smallest ⌊ratio · n⌋ magnitudes stand, as booleans."""
    count = math.floor(ratio * magnitudes.numel() + 1e-9)  # 0.29 · 100 is 28.999… in binary
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[magnitudes.flatten().topk(count, largest=False, sorted=False).indices] = True
    return mask.view_as(magnitudes)
