"""Magnitude pruning of the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, live_entries, survivors_replay
from dosimeter.interfaces import Attack, Defense, Public, Replay
from dosimeter.options import Fraction
from dosimeter.registry import DEFENSES
from dosimeter.types import Distortion, Encoding, Update


@DEFENSES.register("pruning")
@dataclass(frozen=True, kw_only=True)
class Pruning(OutgoingDefense):
    """Sets the smallest entries of the update to zero.

    Zhu, Liu & Han, "Deep Leakage from Gradients", NeurIPS 2019, after Lin et al., "Deep Gradient Compression", ICLR 2018;
    rgla Section 5.3 (80 % to 99.9 %), ilrg Appendix G, thesis Section 4.5.5.
    Of n entries the ⌊ratio · n⌋ of smallest magnitude are set to zero, with ties in no particular order. n counts each layer,
    or the whole update with `scope` "update".
    Departure: pruned entries are not accumulated for the next round (as Lin et al. do), since one round is audited.
    """

    promise: ClassVar[str] = "nothing: the surviving entries are exact"
    breaks: ClassVar[str] = "small gradients are lost for good without error accumulation; accuracy suffers above about 99 %"
    strengths: ClassVar = ({"ratio": 0.9}, {"ratio": 0.99})

    ratio: Fraction
    scope: Literal["layer", "update"] = "layer"

    def distorts(self) -> bool:
        return self.ratio > 0

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.ratio == 0 or not update:
            return dict(update)
        if self.scope == "layer":
            return {name: change.masked_fill(_smallest(change.abs(), self.ratio), 0) for name, change in update.items()}
        magnitudes = torch.cat([change.abs().flatten().double() for change in update.values()])
        masks = _smallest(magnitudes, self.ratio).split([change.numel() for change in update.values()])
        return {name: change.masked_fill(mask.view_as(change), 0) for (name, change), mask in zip(update.items(), masks)}

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        """A pruned entry was no larger than the smallest entry that survived."""
        whole, survived = live_entries(change), self._survivors(change)
        cutoff = float(change[survived].abs().min()) if bool(survived.any()) else 0.0
        low, high = torch.where(survived, whole.low, -cutoff), torch.where(survived, whole.high, cutoff)
        return replace(whole, live=survived, low=low, high=high)

    def _survivors(self, change: Tensor) -> Tensor:
        """The non-zero entries; where later noise filled the zeros, as many of the largest entries as survive pruning."""
        if bool((change == 0).any()) or change.numel() == 0:
            return change != 0
        pruned = min(math.floor(self.ratio * change.numel() + 1e-9), change.numel() - 1)
        return change.abs() >= change.abs().flatten().kthvalue(pruned + 1).values

    def scaling(self) -> Literal["none"]:
        return "none"

    def empties(self) -> bool:
        return self.ratio > 0

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return Replay(note="takes nothing out") if self.ratio == 0 else survivors_replay(sent, _has_zeros, later)

    def encoding(self, before: Encoding) -> Encoding:
        return replace(before, rank=None, sparse=True) if self.ratio > 0 else before


def _has_zeros(change: Tensor) -> bool:
    return not bool(change.all())


def _smallest(magnitudes: Tensor, ratio: float) -> Tensor:
    """A mask of the smallest ⌊ratio · n⌋ magnitudes."""
    count = math.floor(ratio * magnitudes.numel() + 1e-9)  # 0.29 · 100 is 28.999… in binary
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[magnitudes.flatten().topk(count, largest=False, sorted=False).indices] = True
    return mask.view_as(magnitudes)
