"""Only the signs of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, working_dtype
from dosimeter.registry import DEFENSES
from dosimeter.types import Encoding, Update


@DEFENSES.register("sign")
@dataclass(frozen=True, kw_only=True)
class Sign(OutgoingDefense):
    """Sends the sign of each entry and, with `scaled`, each layer's mean magnitude.

    Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018; with `scaled`,
    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019: ‖g‖₁/d · sign(g) of each layer (thesis Table 2.2).
    Departure: no error feedback, since one round is audited (`error_feedback` has it). An entry that is exactly zero stays zero.
    """

    promise: ClassVar[str] = "nothing: one bit an entry is still as many bits as there are parameters"
    breaks: ClassVar[str] = "all magnitudes, so that quotients and row sums of the head lose their meaning; training needs error feedback"

    scaled: bool = True

    def distorts(self) -> bool:
        return True

    def encoding(self, before: Encoding) -> Encoding:
        return Encoding(bits=1, sparse=before.sparse)

    def protect(self, update: Update, rng: Generator) -> Update:
        return {name: change.sign() * _mean_magnitude(change) if self.scaled else change.sign() for name, change in update.items()}


def _mean_magnitude(change: Tensor) -> Tensor:
    if change.numel() == 0:
        return change.new_ones(())
    return change.abs().to(working_dtype(change)).mean(dtype=torch.float64).to(change.dtype)
