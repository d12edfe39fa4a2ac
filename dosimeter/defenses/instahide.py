"""InstaHide: several samples blended, then the signs of pixels flipped at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.client.checks import check_batch
from dosimeter.client.losses import as_distribution
from dosimeter.interfaces import Client, Defense
from dosimeter.options import Constraint, Fraction, OptionError
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
    Without `public` all blended samples are the client's own (the paper's "inside" variant). With `public`, a set's name or a path, the
    later half of each blend are its pictures, which have no labels (the paper's "cross" variant), and the client's own samples have at
    least `private_share` of each blend. Which half is public, and 0.3, are those of the released code.
    Departures: public pictures are brought to the mean and deviation of the client's inputs in every channel (released: to their own
    set's). The labels of a blend are divided by their sum, so that they stay a distribution; the released code leaves them.
    """

    side: ClassVar = "data"
    changes_pixels = True
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset({"sample"})  # a sample that is blended into several moves several gradients
    promise: ClassVar[str] = "nothing that held: Carlini et al. (S&P 2021) recover the samples from the blends"
    breaks: ClassVar[str] = "accuracy by a few points; hard labels are gone"

    images: Several = 4
    largest: Ceiling = 0.65
    public: str | None = None  # the set, or the path, of pictures that half of each blend is drawn from
    private_share: Fraction = 0.3  # that the client's own samples have at least of a blend with public pictures

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.largest * self.images <= 1:
            raise ValueError(f"defense.largest: expected more than 1/{self.images}, as the coefficients sum to one, got {self.largest}")
        if self.private_share >= self.own_images() / self.images:
            least = f"less than {self.own_images()}/{self.images}, the share that even coefficients give"
            raise OptionError("private_share", f"expected {least}, got {self.private_share}")

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs, targets = client.batch.inputs, client.batch.targets
        samples, own = len(inputs), self.own_images()
        if samples < own:
            raise Refused(f"instahide blends {own} samples; this batch has {samples}")
        soft = as_distribution(targets, check_batch(client.model, client.batch, "batch"), inputs.dtype)
        mixing, of_public = (part.to(inputs) for part in self.coefficients(samples, rng))  # (B, B) and (B, p)
        shares = mixing.sum(1, keepdim=True)  # of the client's own samples: (B, 1)
        blends = torch.tensordot(mixing, inputs, dims=1)
        if self.public is not None:
            blends = blends + self._public_blends(inputs, of_public, rng)
        flips = torch.randint(2, inputs.shape, generator=rng, device=rng.device).to(inputs) * 2 - 1
        return replace(client, batch=Batch(flips * blends, mixing @ soft / shares))

    def own_images(self) -> int:
        """How many of a blend's pictures are the client's own."""
        return self.images if self.public is None else (self.images + 1) // 2

    def coefficients(self, samples: int, rng: Generator) -> tuple[Tensor, Tensor]:
        """Those of each blend on the client's samples, among them its own (B, B), and on its p public pictures (B, p)."""
        own = self.own_images()
        order = torch.rand(samples, samples, generator=rng, device=rng.device).fill_diagonal_(-1).argsort(1)[:, :own]
        coefficients, even = _simplex(samples, self.images, rng), 1 / self.images
        excess = (self.largest - even) / (coefficients.max(1, keepdim=True).values - even)
        coefficients = even + (coefficients - even) * excess.clamp(max=1)
        if self.public is not None:
            share, middle = coefficients[:, :own].sum(1, keepdim=True), own * even
            lacking = torch.where(share < self.private_share, (middle - self.private_share) / (middle - share), 1.0)
            coefficients = even + (coefficients - even) * lacking
        mixing = torch.zeros(samples, samples, dtype=torch.float64, device=rng.device)
        return mixing.scatter_(1, order, coefficients[:, :own]), coefficients[:, own:]

    def _public_blends(self, inputs: Tensor, coefficients: Tensor, rng: Generator) -> Tensor:
        """What random public pictures add to each blend, by their coefficients (B, p): (B, *shape)."""
        from dosimeter.data.load import load_images  # late: most clients have no public set

        assert self.public is not None
        if inputs.ndim != 4 or inputs.shape[2] != inputs.shape[3]:
            raise Refused(f"instahide blends square images with those of {self.public}; these inputs have shape {tuple(inputs.shape[1:])}")
        pictures = load_images(self.public, size=inputs.shape[2], channels=inputs.shape[1]).images.to(inputs)
        chosen = torch.randint(len(pictures), coefficients.shape, generator=rng, device=rng.device)
        matched = _like(pictures, inputs)[chosen.to(inputs.device)]  # (B, p, *shape)
        return torch.einsum("bp,bp...->b...", coefficients, matched)


def _like(pictures: Tensor, inputs: Tensor) -> Tensor:
    """The pictures (N, channels, H, W) with the mean and the deviation that the inputs have in each channel."""
    dims, spread = (0, 2, 3), torch.finfo(inputs.dtype).eps
    deviation = inputs.std(dims, correction=0, keepdim=True) / pictures.std(dims, correction=0, keepdim=True).clamp_min(spread)
    return (pictures - pictures.mean(dims, keepdim=True)) * deviation + inputs.mean(dims, keepdim=True)


def _simplex(rows: int, columns: int, rng: Generator) -> Tensor:
    """Uniform on the simplex: standard exponentials divided by their sum."""
    draws = torch.empty(rows, columns, dtype=torch.float64, device=rng.device).exponential_(generator=rng)
    return draws / draws.sum(1, keepdim=True)
