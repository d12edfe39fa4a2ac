"""One sample, walked back through a plain network layer by layer: from the slopes at the logits to the input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.engines.recursion.layer_equations import Solution
from dosimeter.network.chain import Link
from dosimeter.network.convolving import carry_back

SOLVED_ZERO = 1e-4  # over the largest: a solved output below is taken for one of the ReLU's zeros


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is known of one layer when the walk reaches it. All in float64."""

    link: Link
    below: Link | None  # the layer before it, None at the input
    outputs: Tensor  # (out·H'·W',) NaN where they are not known
    slopes: Tensor  # (out·H'·W',) of the loss at the outputs
    gradient: Tensor  # of its weight


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """How many unknowns a layer's input has, and how many of them its equations determine."""

    name: str
    unknowns: int
    rank: int

    @property
    def missing(self) -> int:
        return self.unknowns - self.rank


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where the walk ended, and the ranks on its way, from the input on."""

    inputs: Tensor  # (n,)
    ranks: tuple[LayerRank, ...]  # of the convolutions


def walk_plain(links: Sequence[Link], update: Mapping[str, Tensor], slopes: Tensor, solve_layer: Callable[[Step], Solution]) -> Walk:
    """From the slopes (C,) of the loss at the logits to the network's input. `solve_layer` finds a convolution's input.

    A linear layer's input is ∇Wᵀ ∂L/∂z / ‖∂L/∂z‖², since its gradient is the product of the two.
    """
    ranks: list[LayerRank] = []
    received, outputs = slopes, torch.full_like(slopes, torch.nan)
    for position in range(len(links) - 1, -1, -1):
        link, gradient = links[position], update[links[position].key].double()
        if isinstance(link.module, nn.Linear):
            received = gradient.T @ slopes / slopes.square().sum()
        else:
            below = links[position - 1] if position else None
            found = solve_layer(Step(link=link, below=below, outputs=outputs, slopes=slopes, gradient=gradient))
            received = found.value
            ranks.insert(0, LayerRank(name=link.name, unknowns=len(received), rank=found.rank))
        if link.before is not None and link.before.has_zeros:
            received = torch.where(received > SOLVED_ZERO * received.max(), received, 0)
        slopes, outputs = carry_back(link.module, link.shape, slopes[None]).flatten(), received
        if link.before is not None:
            slopes, outputs = slopes * link.before.slope(received), link.before.inverse(received)
            outputs = torch.where(outputs.isfinite(), outputs, torch.nan)
    return Walk(inputs=received, ranks=tuple(ranks))
