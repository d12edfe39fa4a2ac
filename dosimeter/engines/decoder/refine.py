"""Refinement: with a sample's exact feature known, its decoded image is improved on its own until the model gives that feature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.decoder.network import Decoder
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import decode_without_slope
from dosimeter.network.probing import input_of
from dosimeter.normalization import from_pixels
from dosimeter.progress import advance


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """Ours; in no paper. Adam on each image's own ‖φ(x) − f‖² / ‖f‖² + τ TV(x) + κ (x − x₀)², from the decoded image x₀.

    One forward and one backward pass a step: no double backward, and in eval mode no coupling between samples. In train mode
    the whole batch passes at once, as the client's did, so that batch norm sees the statistics that it saw there.
    """

    steps: int
    learning_rate: float = 0.01
    total_variation: float = 1e-2
    anchor: float = 0.0

    def __call__(self, target: Target, start: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(n, *image) pixels and the features (n, H) that they should have; pixels and the relative feature errors left, (n,)."""
        wanted = features.to(start)
        size = wanted.square().sum(1).clamp_min(1e-30)
        pixels = start.detach().clone().requires_grad_()
        optimizer = torch.optim.Adam([pixels], lr=self.learning_rate)
        best, lowest = start.detach().clone(), torch.full_like(size, torch.inf)
        for step in range(self.steps + 1):
            error = (_features(target, pixels) - wanted).square().sum(1) / size  # (n,)
            objective = error + self.total_variation * _variation(pixels) + self.anchor * (pixels - start).square().mean((1, 2, 3))
            better = (objective < lowest).detach() & objective.isfinite()
            best = torch.where(better[:, None, None, None], pixels.detach(), best)
            lowest = torch.where(better, objective.detach(), lowest)
            if step == self.steps:
                break
            (pixels.grad,) = torch.autograd.grad(objective.sum(), [pixels])
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * (1 - 0.9 * step / self.steps)
            optimizer.step()
            with torch.no_grad():
                pixels.clamp_(0, 1)
            advance(step + 1, self.steps, "refining")
        with torch.no_grad():
            left = ((_features(target, best) - wanted).square().sum(1) / size).sqrt()
        return best, left


def gain(refinement: Refinement, target: Target, decoder: Decoder, pixels: Tensor) -> float:
    """What the refinement does to auxiliary images (n, *image) that were drawn from their own features: decibels gained, on average.

    Deep features are matched by images that look nothing like the true one as well, so that a better match can be a worse
    picture. The server finds that out on images that it has.
    """
    features = target.features(pixels)
    start = decode_without_slope(decoder, features)
    refined, _ = refinement(target, start, features)
    before, after = ((images - pixels).square().mean((1, 2, 3)).clamp_min(1e-10) for images in (start, refined))
    return float((10 * (before / after).log10()).mean())


def _features(target: Target, pixels: Tensor) -> Tensor:
    """What the head receives of pixels (n, *image), differentiable: (n, H)."""
    return input_of(target.model, target.head, from_pixels(pixels, target.normalization), differentiable=True)


def _variation(pixels: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels: (n,)."""
    down, across = pixels.diff(dim=-2).abs().mean((1, 2, 3)), pixels.diff(dim=-1).abs().mean((1, 2, 3))
    return down + across
