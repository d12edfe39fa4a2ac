"""Rows whose negative half mirrors their positive half (trap weights)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.received_model import Sent

SMALLEST = 1e-12
SAMPLED = 64  # rows a layer
ALIKE = 0.05  # relative deviation up to which weights are of one magnitude


def measure(sent: Sent) -> Measured:
    """Minus the decimal logarithm of how far the sorted positive weights of a typical row are from its negative ones scaled."""
    layers = [layer for layer in sent.linear if layer.weight.shape[1] >= 16]
    if not layers:
        return 0.0, "no linear layer is wide enough for rows whose halves mirror each other"
    misfits = {layer.name: _mirror_misfit(layer.weight) for layer in layers}
    name = min(misfits, key=lambda key: misfits[key])
    misfit = misfits[name]
    return -math.log10(
        max(misfit, SMALLEST)
    ), f"in {name!r} the negative half of a typical row mirrors the positive half to within {misfit:.2g}"


def _mirror_misfit(weight: Tensor) -> float:
    """The median over rows of ‖positives − s · negatives‖ / ‖positives − their mean‖, each sorted; 1 where the halves differ in number.

    A row that one step of Adam made of zero has weights of one magnitude, whose halves are alike without being mirrored.
    """
    misfits = []
    for row in weight[:: max(1, len(weight) // SAMPLED)].double():
        positive, negative = row[row > 0].sort().values, (-row[row < 0]).sort().values
        if len(positive) != len(negative) or len(positive) < 8:
            misfits.append(1.0)
            continue
        scale = (positive @ negative) / (negative @ negative)
        varied = float((positive - positive.mean()).norm())
        mirrored = varied > ALIKE * float(positive.norm())
        misfits.append(float((positive - scale * negative).norm()) / varied if mirrored else 1.0)
    return float(torch.tensor(misfits).median()) if misfits else 1.0
