"""Laplace noise on the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, with_noise, working_dtype
from dosimeter.options import FiniteFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("laplace_noise")
@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(OutgoingDefense):
    """Adds independent Laplace noise to every entry of the update.

    Dwork et al., "Calibrating Noise to Sensitivity in Private Data Analysis", TCC 2006; soft-labels Section 5.2.
    `scale` is the Laplace distribution's b: the standard deviation is √2 · scale.
    With `relative`, each layer's scale is `scale` times the layer's largest magnitude.
    """

    promise: ClassVar[str] = "nothing by itself: an ε needs a bound on the update's L1 norm, which grows with the number of parameters"
    breaks: ClassVar[str] = "accuracy, as Gaussian noise does, with heavier tails"

    scale: FiniteFloat
    relative: bool = False

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.scale == 0:
            return dict(update)
        return with_noise(update, _standard_laplace, rng, size=self.scale, relative=self.relative, defense=self.name)


def _standard_laplace(like: Tensor, rng: Generator) -> Tensor:
    """The difference of two standard exponentials: finite everywhere, unlike the inverse of the distribution function at 0."""
    pair = torch.empty(2, *like.shape, dtype=working_dtype(like), device=rng.device).exponential_(generator=rng)
    return (pair[0] - pair[1]).to(like.device, like.dtype)
