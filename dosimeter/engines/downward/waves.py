"""Inputs as sums of waves, for optimisers that treat all unknowns alike.

The spectrum of pictures falls as 1 / f. In units that fall alike, all waves of a picture are of one size, and Adam's even steps find the
coarse ones as fast as the fine ones. Steps on single pixels find the coarse ones last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

FAINT = 0.05  # of the first waves
SLOPE = 4.0  # of the logistic function that keeps inputs within their bounds
EDGE = 1e-3  # of the range: inputs at a bound begin that far inside


@dataclass(frozen=True, kw_only=True)
class Waves:
    """From real unknowns (B, n) to inputs (B, *shape) within bounds; inputs without a grid have one unknown each."""

    shape: tuple[int, ...]  # samples first
    low: Tensor
    high: Tensor
    sizes: Tensor | None  # (H, W // 2 + 1) of the waves in pictures; none without a grid

    @classmethod
    def of(cls, shape: tuple[int, ...], low: Tensor, high: Tensor) -> Waves:
        if len(shape) != 4:
            return cls(shape=shape, low=low, high=high, sizes=None)
        return cls(shape=shape, low=low, high=high, sizes=picture_spectrum(*shape[2:]).to(low))

    def faint(self, rng: Generator) -> Tensor:
        """Unknowns of a grey batch with a little of each wave."""
        shape = self.shape if self.sizes is None else (*self.shape[:2], *self.sizes.shape, 2)
        return FAINT * torch.randn(shape, generator=rng, device=rng.device).to(self.low).flatten(1)

    def shares(self, unknowns: Tensor) -> Tensor:
        """Inputs as shares of their range, in (0, 1)."""
        if self.sizes is None:
            return torch.sigmoid(SLOPE * unknowns.reshape(self.shape))
        spectrum = torch.view_as_complex(unknowns.reshape(*self.shape[:2], *self.sizes.shape, 2)) * self.sizes
        return torch.sigmoid(SLOPE * torch.fft.irfft2(spectrum, s=self.shape[2:], norm="ortho"))

    def inputs(self, shares: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * shares

    def unknowns(self, inputs: Tensor) -> Tensor:
        """The unknowns that lead to some inputs."""
        shares = ((inputs - self.low) / (self.high - self.low)).clamp(EDGE, 1 - EDGE)
        flat = torch.logit(shares) / SLOPE
        if self.sizes is None:
            return flat.flatten(1)
        return torch.view_as_real(torch.fft.rfft2(flat, norm="ortho") / self.sizes).flatten(1)


def picture_spectrum(height: int, width: int) -> Tensor:
    """How large each wave (H, W // 2 + 1) is in pictures, 1 / f."""
    down, right = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    sizes = 1 / (down.square() + right.square()).sqrt().clamp_min(1 / max(height, width))
    return sizes / sizes.square().mean().sqrt()
