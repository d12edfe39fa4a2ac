"""Laplace noise on the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, largest_magnitude, live_entries, noise_replay, with_noise, working_dtype
from dosimeter.interfaces import Attack, Defense, Public, Replay
from dosimeter.options import FiniteFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Distortion, Encoding, Update


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

    noise_shape: ClassVar = "laplace"

    scale: FiniteFloat
    relative: bool = False

    def distorts(self) -> bool:
        return self.scale > 0

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.scale == 0:
            return dict(update)
        return with_noise(update, standard_laplace, rng, size=self.scale, relative=self.relative, defense=self.name)

    def deviation(self, change: Tensor) -> float:
        """The noise's standard deviation in a layer, from the layer as it was sent."""
        return math.sqrt(2) * self.scale * (largest_magnitude(change) if self.relative else 1.0)

    def noise_floor(self, change: Tensor, batch_size: int) -> float:
        """The Fisher information of a Laplace distribution about its place is 1/scale²."""
        return self.deviation(change) / math.sqrt(2)

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        return live_entries(change, noise=self.deviation(change))

    def scaling(self) -> Literal["none"]:
        return "none"

    def adds_noise(self) -> bool:
        return self.scale > 0

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return noise_replay(sent, self.deviation, relative=self.relative)

    def encoding(self, before: Encoding) -> Encoding:
        return Encoding() if self.scale > 0 else before


def standard_laplace(like: Tensor, rng: Generator) -> Tensor:
    """The difference of two standard exponentials: finite everywhere, unlike the inverse of the distribution function at 0."""
    pair = torch.empty(2, *like.shape, dtype=working_dtype(like), device=rng.device).exponential_(generator=rng)
    return (pair[0] - pair[1]).to(like.device, like.dtype)
