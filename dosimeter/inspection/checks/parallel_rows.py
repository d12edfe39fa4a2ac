"""Rows of a linear layer that are copies of one another with ordered biases (imprint)."""

from __future__ import annotations

import torch

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.layer import LinearLayer
from dosimeter.inspection.received_model import Sent
from dosimeter.randomness import generator

DIRECTIONS = 64  # that rows are projected onto before they are compared
ALIKE = 0.999  # cosine from which two rows count as parallel
APART = 0.01  # of the spread of what they meet: from there on two parallel rows fire at different places
LARGEST = 8192  # rows compared
SPARSE = 3  # entries: with fewer, rows that pruning left are copies by chance
CROWD = 8  # copies, and four times as many as there are rows for each column, that chance does not give such rows


def measure(sent: Sent) -> Measured:
    """The largest share of a hidden linear layer's rows that are copies of one that fires at another place, or of two others.

    Two neurons that are copies, or mirror images, of each other and fire at one place are how networks are widened, and how
    they are made to look linear at first.
    """
    layers = [layer for layer in sent.hidden if min(layer.weight.shape) >= 8]
    if not layers:
        return 0.0, "no hidden linear layer has rows that could be copies"
    shares = {layer.name: _parallel_share(layer) for layer in layers}
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} are copies of another row of it up to a factor"


def _parallel_share(layer: LinearLayer) -> float:
    weight = layer.weight[:LARGEST]
    filled = weight.norm(dim=1) > 0
    rows = weight[filled]
    if len(rows) < 2:
        return 0.0
    sizes = rows.norm(dim=1).double()
    offset = torch.zeros_like(sizes) if layer.bias is None else layer.bias[:LARGEST][filled].double()
    places = -offset / sizes  # along the row's direction
    spread = ((layer.received.to(rows) @ rows.T).double() / sizes).std(0, correction=0)  # (k,)
    sparse = (rows != 0).sum(1) < SPARSE
    if rows.shape[1] > DIRECTIONS:
        directions = torch.randn(rows.shape[1], DIRECTIONS, generator=generator(0, "parallel rows"))
        rows = rows @ directions.to(rows)
    rows = rows.double() / rows.double().norm(dim=1, keepdim=True)
    cosines = rows @ rows.T
    alike = (cosines.abs() > ALIKE).fill_diagonal_(fill_value=False)
    apart = (places[:, None] - cosines.sign() * places).abs() > APART * spread[:, None]
    copies = alike.sum(1)
    binned = (alike & apart).any(1) | (copies >= 2)
    crowded = copies >= max(CROWD, 4 * len(rows) / weight.shape[1])
    return float((binned & (crowded | ~sparse)).double().mean())
