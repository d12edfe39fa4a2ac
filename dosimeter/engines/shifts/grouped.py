"""A grouped convolution is a convolution for each group of channels, and the gradient of each shows its own part of the maps.

Every group mixes its samples by a matrix of its own, and nothing in the layer's gradient ties the groups' samples together. So one
sample is read. Its parts have a factor for each group, and stand for samples of one dense layer where the factors are solved for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.engines.shifts.layout import Layout, NoLayout, read_layout
from dosimeter.engines.shifts.scales import LEAST_WITNESSES


@dataclass(frozen=True, kw_only=True)
class GroupedParts:
    """One sample's part of each group, up to a factor, as if they were samples of a dense layer."""

    layer: ConvolutionLayer  # with the groups' kernels as blocks of a dense one
    layout: Layout  # of G parts; its rank is that of the group that shows its positions least clearly


def read_groups(layer: ConvolutionLayer, *, unit: float, noise: float, batch_size: int | None) -> GroupedParts:
    groups = layer.groups
    outputs, inputs = layer.gradient.shape[0] // groups, layer.gradient.shape[1]
    if batch_size is not None and batch_size > 1:
        raise NoLayout(f"{groups} groups: each shows the {batch_size} samples in an order of its own")
    dense = layer.gradient.new_zeros(groups, outputs, groups, inputs, *layer.gradient.shape[2:])
    parts = []
    for group, gradient in enumerate(layer.gradient.chunk(groups)):
        dense[group, :, group] = gradient
        parts.append(read_layout(gradient, layer.reads, unit=unit, noise=noise, batch_size=batch_size))
    if outputs < 1 + LEAST_WITNESSES:
        raise NoLayout(f"{groups} groups: {outputs} outputs of a group are too few bias gradients to tell its factor")
    counts = sorted({len(part.maps) for part in parts})
    if counts != [1]:
        raise NoLayout(f"{groups} groups: each shows the {counts[-1]} samples in an order of its own")
    least = min(parts, key=lambda part: part.rank.gap)
    maps, errors = (_in_place([getattr(part, name) for part in parts]) for name in ("maps", "disagreement"))
    rank = replace(least.rank, noise=least.rank.noise / math.sqrt(groups))  # of an entry of the dense kernel, most of which are zero
    return GroupedParts(
        layer=replace(layer, gradient=dense.flatten(2, 3).flatten(0, 1)),
        layout=replace(least, maps=maps, disagreement=errors, rank=rank, corner_gap=min(part.corner_gap for part in parts)),
    )


def _in_place(parts: list[Tensor]) -> Tensor:
    """(1, H·W, in) of each group -> (G, H·W, G·in), zero outside of a group's own channels."""
    count = len(parts)
    rows = [[part[0] if one == group else torch.zeros_like(part[0]) for one in range(count)] for group, part in enumerate(parts)]
    return torch.stack([torch.cat(row, 1) for row in rows])
