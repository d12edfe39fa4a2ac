"""Rows of a linear layer that are copies of one another with different biases (imprint, loki)."""

from __future__ import annotations

import torch

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.layer import LinearLayer
from dosimeter.inspection.received_model import ReceivedModel
from dosimeter.randomness import generator

DIRECTIONS = 64  # random ones, onto which rows are projected before they are compared
PARALLEL = 0.999  # cosine from which on two rows are parallel
APART = 0.01  # of the inputs' spread along the row: from there on two parallel rows fire at different places
MOST_ROWS = 8192  # that are compared
SPARSE = 3  # entries: rows with fewer, as pruning leaves them, may be copies by chance
CROWD = 8  # copies of a sparse row that are no chance; with many rows a column, four times that number


def measure(received_model: ReceivedModel) -> Measured:
    """The largest share of a hidden linear layer's rows that are parallel to a row that fires at another place, or to two others.

    Honest networks have pairs of parallel rows too: a layer may be widened by copies, or begin as a linear function made of mirror
    images. Such pairs fire at one place.
    """
    layers = [layer for layer in received_model.hidden if min(layer.weight.shape) >= 8]
    if not layers:
        return 0.0, "no hidden linear layer has rows that could be copies"
    shares = {layer.name: _parallel_share(layer) for layer in layers}
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} are copies of another row of it up to a factor"


def _parallel_share(layer: LinearLayer) -> float:
    weight = layer.weight[:MOST_ROWS]
    filled = weight.norm(dim=1) > 0
    rows = weight[filled]
    if len(rows) < 2:
        return 0.0
    sizes = rows.norm(dim=1).double()
    offset = torch.zeros_like(sizes) if layer.bias is None else layer.bias[:MOST_ROWS][filled].double()
    places = -offset / sizes  # along the row's direction
    spread = ((layer.received.to(rows) @ rows.T).double() / sizes).std(0, correction=0)  # (k,)
    sparse = (rows != 0).sum(1) < SPARSE
    if rows.shape[1] > DIRECTIONS:
        directions = torch.randn(rows.shape[1], DIRECTIONS, generator=generator(0, "parallel rows"))
        rows = rows @ directions.to(rows)
    rows = rows.double() / rows.double().norm(dim=1, keepdim=True)
    cosines = rows @ rows.T
    alike = (cosines.abs() > PARALLEL).fill_diagonal_(fill_value=False)
    apart = (places[:, None] - cosines.sign() * places).abs() > APART * spread[:, None]
    copies = alike.sum(1)
    binned = (alike & apart).any(1) | (copies >= 2)
    crowded = copies >= max(CROWD, 4 * len(rows) / weight.shape[1])
    return float((binned & (crowded | ~sparse)).double().mean())
