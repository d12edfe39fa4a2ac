"""The network that draws an image from a feature: upsampling stages behind a standardised feature map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

STAGES = 5  # of a decoder at full depth, from 7 to 224 pixels
SMALLEST_GRID = 4  # cells a side that a feature without positions is first spread over
NARROWEST = 32  # channels of the last stages at least, unless the first has fewer
LEAST_SPREAD = 1e-6  # of a feature, relative to the largest, below which it is a constant


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a decoder takes and gives: with the width, all that its architecture depends on."""

    feature: tuple[int, int, int]  # (channels, height, width); height and width are 1 where the feature has no positions
    image: tuple[int, int, int]  # (channels, height, width)
    width: int = 512  # channels of the feature's own grid and of the first stage; each later one has half
    finest: int | None = None  # pixels a side beyond which an image is drawn by scaling it up; none: its own size

    @property
    def grid(self) -> tuple[int, int]:
        """The map that the first stage doubles."""
        _, height, width = self.feature
        if height * width > 1:
            return height, width
        return _spread(self.image[1]), _spread(self.image[2])

    @property
    def stages(self) -> int:
        """Doublings that reach the image's size, or the finest that is drawn, at least one."""
        sides = (min(side, self.finest or side) for side in self.image[1:])
        return max(1, *(math.ceil(math.log2(side / cells)) for side, cells in zip(sides, self.grid)))


class Decoder(nn.Module):
    """Feature (n, H) -> pixels in [0, 1] (n, channels, height, width).

    Xue et al., "Fast Generation-Based Gradient Leakage Attacks against Highly Compressed Gradients", INFOCOM 2023: each stage has a
    transposed convolution of stride 2 and three residual convolutions. Five stages lead from 7 to 224 pixels, then a sigmoid.
    Departures: the sizes determine the number of stages; `finest` removes those beyond the auxiliary images' detail. Features are
    standardised with the auxiliary data's moments. A 1x1 convolution, which saves three quarters of the weights, and three residual
    convolutions come first. A linear layer spreads pooled features over a small grid. Too large outputs shrink before the last
    convolution, too small ones grow after it.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        channels, height, width = shape.feature
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("spread", torch.ones(channels, 1, 1))
        self.entry: nn.Module = nn.Conv2d(channels, shape.width, 1)
        if height * width == 1:
            rows, columns = shape.grid
            self.entry = nn.Sequential(
                nn.Flatten(), nn.Linear(channels, shape.width * rows * columns), nn.Unflatten(1, (-1, rows, columns))
            )
        self.opening = Residuals(shape.width)
        widths = [max(shape.width >> stage, min(NARROWEST, shape.width)) for stage in range(shape.stages)]
        self.stages = nn.Sequential(*(Stage(before, after) for before, after in zip([shape.width, *widths], widths)))
        self.exit = nn.Conv2d(widths[-1], shape.image[0], 3, padding=1)

    def standardise(self, features: Tensor) -> None:
        """Take the moments of auxiliary features (n, H), channel by channel."""
        maps = features.double().reshape(len(features), self.shape.feature[0], -1)
        spread, mean = torch.std_mean(maps, (0, 2), correction=0)
        self.mean.copy_(mean[:, None, None])
        self.spread.copy_(spread.clamp_min(LEAST_SPREAD * float(spread.max().clamp_min(1e-30)))[:, None, None])

    def forward(self, features: Tensor) -> Tensor:
        maps = features.reshape(-1, *self.shape.feature)
        maps = self.stages(self.opening(self.entry((maps - self.mean) / self.spread)))
        size = self.shape.image[1:]
        if maps.shape[-2] > size[0] or maps.shape[-1] > size[1]:
            maps = interpolate(maps.float(), size, mode="bilinear", antialias=True)
        drawn = self.exit(maps).sigmoid()
        return drawn if drawn.shape[-2:] == size else interpolate(drawn.float(), size, mode="bilinear")


class Stage(nn.Module):
    """Twice the size by a transposed convolution, then three residual convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.residuals = Residuals(after)

    def forward(self, maps: Tensor) -> Tensor:
        return self.residuals(self.up(maps))


class Residuals(nn.ModuleList):
    """Three convolutions, each of which adds to what it sees."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(3)
        )

    def forward(self, maps: Tensor) -> Tensor:
        for residual in self:
            maps = maps + residual(maps)
        return maps


def default_width(image: Sequence[int]) -> int:
    """512 channels at 128 pixels and more, in proportion below, never fewer than 32."""
    return min(512, max(32, 4 * max(image[1:], default=8)))


def _spread(side: int) -> int:
    return min(side, max(SMALLEST_GRID, math.ceil(side / 2**STAGES)))
