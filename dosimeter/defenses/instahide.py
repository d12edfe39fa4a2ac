"""InstaHide: several samples blended, then the signs of pixels flipped at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.client.checks import check_batch
from dosimeter.client.losses import as_distribution
from dosimeter.interfaces import Client, Defense
from dosimeter.options import Constraint
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, ProtectedUnit, Refused

Several = Annotated[int, Constraint("an int of at least 2", lambda value: value >= 2)]
Ceiling = Annotated[float, Constraint("a number in (0, 1]", lambda value: 0 < value <= 1)]


@DEFENSES.register("instahide")
@dataclass(frozen=True, kw_only=True)
class InstaHide(Defense):
    """Trains on blends of `images` samples whose pixels then change sign at random.

    Huang et al., "InstaHide: Instance-hiding Schemes for Private Distributed Learning", ICML 2020: Algorithm 1. Coefficients are
    uniform on the simplex. Where one exceeds `largest` (the paper's c₁ = 0.65), all are moved towards even shares until none
    does. Each pixel of each blend is multiplied by ±1.
    Inputs should be centred on zero, as in the paper. Otherwise the sign reveals the flip.
    Departure: all blended samples are the client's own (the paper's "inside" variant), since there is no public set here.
    """

    side: ClassVar = "data"
    changes_pixels = True
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset({"sample"})  # a sample that is blended into several moves several gradients
    promise: ClassVar[str] = "nothing that held: Carlini et al. (S&P 2021) recover the samples from the blends"
    breaks: ClassVar[str] = "accuracy by a few points; hard labels are gone"

    images: Several = 4
    largest: Ceiling = 0.65

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.largest * self.images <= 1:
            raise ValueError(f"defense.largest: expected more than 1/{self.images}, as the coefficients sum to one, got {self.largest}")

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs, targets = client.batch.inputs, client.batch.targets
        samples = len(inputs)
        if samples < self.images:
            raise Refused(f"instahide blends {self.images} samples; this batch has {samples}")
        soft = as_distribution(targets, check_batch(client.model, client.batch, "batch"), inputs.dtype)
        mixing = self.mixing_matrix(samples, rng).to(inputs)  # (B, B)
        flips = torch.randint(2, inputs.shape, generator=rng, device=rng.device).to(inputs) * 2 - 1
        return replace(client, batch=Batch(flips * torch.tensordot(mixing, inputs, dims=1), mixing @ soft))

    def mixing_matrix(self, samples: int, rng: Generator) -> Tensor:
        """Row i holds the coefficients of blend i: on sample i and on images − 1 others, at random: (B, B)."""
        order = torch.rand(samples, samples, generator=rng, device=rng.device).fill_diagonal_(-1).argsort(1)[:, : self.images]
        coefficients, even = _simplex(samples, self.images, rng), 1 / self.images
        excess = (self.largest - even) / (coefficients.max(1, keepdim=True).values - even)
        coefficients = even + (coefficients - even) * excess.clamp(max=1)
        return torch.zeros(samples, samples, dtype=torch.float64, device=rng.device).scatter_(1, order, coefficients)


def _simplex(rows: int, columns: int, rng: Generator) -> Tensor:
    """Uniform on the simplex: standard exponentials divided by their sum."""
    draws = torch.empty(rows, columns, dtype=torch.float64, device=rng.device).exponential_(generator=rng)
    return draws / draws.sum(1, keepdim=True)
