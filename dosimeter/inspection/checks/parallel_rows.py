"""Rows of a linear layer that are copies of one another with ordered biases (imprint)."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.inspection.sent import Sent
from dosimeter.randomness import generator

DIRECTIONS = 64  # that rows are projected onto before they are compared
ALIKE = 0.999  # cosine from which two rows count as parallel
LARGEST = 8192  # rows compared


def measure(sent: Sent) -> tuple[float, str] | None:
    """The largest share of a hidden linear layer's rows that are parallel to another of its rows."""
    layers = [layer for layer in sent.hidden if min(layer.weight.shape) >= 8]
    if not layers:
        return None
    shares = {layer.name: _parallel_share(layer.weight) for layer in layers}
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} are copies of another row of it up to a factor"


def _parallel_share(weight: Tensor) -> float:
    weight = weight[:LARGEST]
    rows = weight[weight.norm(dim=1) > 0]
    if len(rows) < 2:
        return 0.0
    if rows.shape[1] > DIRECTIONS:
        directions = torch.randn(rows.shape[1], DIRECTIONS, generator=generator(0, "parallel rows"))
        rows = rows @ directions.to(rows)
    rows = rows.double() / rows.double().norm(dim=1, keepdim=True)
    alike = (rows @ rows.T).abs() > ALIKE
    return float((alike.sum(1) > 1).double().mean())
