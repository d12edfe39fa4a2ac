"""Pictures in black and white, read off rows whose entries a defense rounded or pruned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.subspace.distortion import distortion_of
from dosimeter.interfaces import Public
from dosimeter.normalization import input_bounds
from dosimeter.types import Normalization

PREMISE = "the inputs are pictures in black and white"
NOISE_REACH = 6.0  # the largest error of an entry, in standard deviations of the noise
ROUNDING = 4e-6  # relative to a row's largest entry, in single precision
SHARP_ENTRY = 0.1  # of the way from black to white, up to which an entry may be off
SMALL_ENTRY = 0.45  # the same for an entry that was set to zero
LEAST_PIXELS = 8  # of each colour


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Gradients of rows, and by how much each entry may be off."""

    weight: Tensor  # (k, d)
    bias: Tensor  # (k,)
    weight_reach: Tensor  # (k, d)
    bias_reach: Tensor  # (k,)


def reach_of(change: Tensor, public: Public) -> Tensor:
    """By how much the declared defenses may have changed each entry of a layer that was sent as `change`."""
    distortion = distortion_of(change, public)
    if distortion is None:
        return torch.zeros_like(change, dtype=torch.float64)
    bounds = torch.maximum(distortion.high - change, change - distortion.low).double()
    return torch.where(distortion.live, NOISE_REACH * distortion.noise, bounds)


def black_and_white(rows: Rows, shape: tuple[int, ...], normalization: Normalization) -> tuple[Tensor, Tensor]:
    """The rows (n,) that hold one picture in black and white each, and these pictures (n, d), each once.

    A row that one sample x fires alone has the weight gradient δ x and the bias gradient δ. Of a mixture of such pictures, the pixels in
    which they differ lie between black and white, or beyond. So where every pixel is near black or near white for one δ, all samples but
    one have small shares, and each pixel shows the colour of that one. A pixel that was set to zero is black if white would have stayed.
    """
    weight, bias = rows.weight.double(), rows.bias.double()
    black, white = (bound.expand(1, *shape).flatten().double() for bound in input_bounds(normalization, weight.new_zeros(1, *shape)))
    is_white = (weight - bias[:, None] * white).abs() < (weight - bias[:, None] * black).abs()  # (k, d)
    colours = torch.where(is_white, white, black)
    reach = rows.weight_reach + ROUNDING * weight.abs().amax(1, keepdim=True)
    low, high = _shares(weight, reach, colours)
    low = torch.maximum(low, bias - rows.bias_reach - ROUNDING * bias.abs())
    high = torch.minimum(high, bias + rows.bias_reach + ROUNDING * bias.abs())
    share = torch.minimum(low.abs(), high.abs())  # the smallest |δ| that fits
    limit = torch.where(weight == 0, SMALL_ENTRY, SHARP_ENTRY) * (white - black) * share[:, None]
    sharp = (reach < limit).all(1)
    fits = (low <= high) & (low * high > 0) & sharp & (is_white.sum(1) >= LEAST_PIXELS) & ((~is_white).sum(1) >= LEAST_PIXELS)
    found = fits.nonzero().flatten()
    pictures = colours[found]
    first = ~torch.tril(torch.cdist(pictures, pictures) == 0, -1).any(1)
    return found[first], pictures[first]


def _shares(weight: Tensor, reach: Tensor, colours: Tensor) -> tuple[Tensor, Tensor]:
    """The δ between which all entries (k, d) of a row fit their colours: (k,) each, the first above the second where none fits."""
    ends = torch.stack([(weight - reach) / colours, (weight + reach) / colours])
    none = colours == 0
    low = torch.where(none, -torch.inf, ends.amin(0)).amax(1)
    high = torch.where(none, torch.inf, ends.amax(0)).amin(1)
    off = (none & (weight.abs() > reach)).any(1)  # a pixel without weight must show nothing
    return torch.where(off, torch.inf, low), high
