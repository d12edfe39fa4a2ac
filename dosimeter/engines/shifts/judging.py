"""Whether a layer's maps are certified: how far they may be off, and whether shifts of them explain the layer's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.engines.shifts.layout import Layout, Rank
from dosimeter.engines.shifts.scales import shifted_maps

MISFIT_SLACK = 1.5  # over what the noise alone explains
LARGEST_MISFIT = 1e-3  # of the layer's gradient by shifts of the maps, relative
LARGEST_NOISE_SHARE = 0.1  # of the gradient's entries
LARGEST_ERROR_BAR = 1e-2
LAYOUT_SLACK = 8.0  # two passes over the grid share a part of their error
ARITHMETIC_SLACK = 4096.0  # rounding units of double precision, which the least direction of the spectrum enlarges
MERGED_SLACK = 2.0  # slopes may differ less than maps do


@dataclass(frozen=True, kw_only=True)
class LayerMaps:
    """The inputs of one convolution, sample by sample, in no particular order."""

    maps: Tensor  # (B, in, H, W)
    slopes: Tensor  # (B, out, H, W) of the loss behind the convolution
    certified: Tensor  # (B,) bool
    error_bars: Tensor  # (B,) relative
    misfit: float  # of the layer's gradient
    scale_source: str
    layout: Layout


def judge(
    layer: ConvolutionLayer,
    layout: Layout,
    maps: Tensor,
    slopes: Tensor,
    bars: Tensor,
    certain: Tensor,
    source: str,
    *,
    batch_size: int | None,
) -> LayerMaps:
    """Certified are maps with a small error bar, where shifts of all of them explain the layer's gradient."""
    if batch_size != len(maps):
        bars = torch.hypot(bars, _hidden_difference(layer, maps, slopes, layout.rank))
    arithmetic = ARITHMETIC_SLACK * torch.finfo(torch.float64).eps / layout.rank.smallest_kept  # of this engine, beside the gradient's own
    bars = torch.hypot(bars, torch.full_like(bars, arithmetic))
    misfit = _misfit(layer, maps, slopes)
    return LayerMaps(
        maps=_grid(maps, layer.height, layer.width),
        slopes=_grid(slopes, layer.reads.output_height, layer.reads.output_width),
        certified=certain & (bars < LARGEST_ERROR_BAR) & (misfit < _largest_misfit(layer, layout.rank)),
        error_bars=bars,
        misfit=misfit,
        scale_source=source,
        layout=layout,
    )


def _misfit(layer: ConvolutionLayer, maps: Tensor, slopes: Tensor) -> float:
    """How far shifts of these maps are from explaining the whole kernel's gradient, relative."""
    shifted = shifted_maps(layer, maps)  # (n, k·k·in)
    wanted = layer.gradient.to(maps).permute(2, 3, 1, 0).flatten(0, 2)  # (k·k·in, out)
    return float((shifted.T @ slopes.flatten(0, 1) - wanted).norm() / wanted.norm())


def _largest_misfit(layer: ConvolutionLayer, rank: Rank) -> float:
    """Noise explains as much of the misfit as it has of the gradient."""
    share = rank.noise / float(layer.gradient.to(torch.float64).square().mean().sqrt())
    return math.hypot(LARGEST_MISFIT, MISFIT_SLACK * share) if share < LARGEST_NOISE_SHARE else 0.0


def error_bars(maps: Tensor, errors: Tensor, of_scale: Tensor, unit: float) -> Tensor:
    """Relative, from the disagreement of two passes, the errors of factor and direction, and the rounding: (B,)."""
    layout = LAYOUT_SLACK * errors.flatten(1).norm(dim=1) / maps.flatten(1).norm(dim=1)
    return (layout.square() + of_scale.square() + (16 * unit) ** 2).sqrt()


def _hidden_difference(layer: ConvolutionLayer, maps: Tensor, slopes: Tensor, rank: Rank) -> Tensor:
    """How far a map may be from a sample that merged with another one: (B,).

    Two samples that hardly differ, in maps by Δa and in slopes by Δδ, look like their mean. Their difference adds Δδ Δa / 2 to the
    gradient, which the noise hides where it is small. This takes slopes to differ as much as maps do. The smallest batch that has the
    update, a premise of the certificate, has no such samples.
    """
    shifted = shifted_maps(layer, maps).reshape(len(maps), layer.reads.outputs, -1)
    own = torch.linalg.matrix_norm(slopes.transpose(1, 2) @ shifted)  # (B,) of each sample's gradient
    return MERGED_SLACK * (rank.largest_dropped * rank.largest * layer.positions**0.5 / own).sqrt()


def _grid(values: Tensor, height: int, width: int) -> Tensor:
    """(B, H·W, channels) -> (B, channels, H, W)."""
    return values.transpose(1, 2).reshape(len(values), -1, height, width)
