"""Rows whose negative half mirrors their positive half (trap weights)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.received_model import ReceivedModel

SMALLEST_MISFIT = 1e-12  # smaller ones count as this
ROWS = 64  # of a layer that are looked at
ONE_MAGNITUDE = 0.05  # relative deviation up to which a row's weights are of one magnitude


def measure(received_model: ReceivedModel) -> Measured:
    """How well a typical row's negative weights, rescaled, match its positive ones: −log10 of the distance."""
    layers = [layer for layer in received_model.linear if layer.weight.shape[1] >= 16]
    if not layers:
        return 0.0, "no linear layer is wide enough for rows whose halves mirror each other"
    misfits = {layer.name: _mirror_misfit(layer.weight) for layer in layers}
    name = min(misfits, key=lambda key: misfits[key])
    misfit = misfits[name]
    return -math.log10(
        max(misfit, SMALLEST_MISFIT)
    ), f"in {name!r} the negative half of a typical row mirrors the positive half to within {misfit:.2g}"


def _mirror_misfit(weight: Tensor) -> float:
    """The median over rows of ‖positives − s · negatives‖ / ‖positives − their mean‖, both sorted.

    It is 1 for a row whose halves differ in number, or whose weights are of one magnitude: one step of Adam from zero makes such rows.
    """
    misfits = []
    for row in weight[:: max(1, len(weight) // ROWS)].double():
        positive, negative = row[row > 0].sort().values, (-row[row < 0]).sort().values
        if len(positive) != len(negative) or len(positive) < 8:
            misfits.append(1.0)
            continue
        scale = (positive @ negative) / (negative @ negative)
        varied = float((positive - positive.mean()).norm())
        varies = varied > ONE_MAGNITUDE * float(positive.norm())
        misfits.append(float((positive - scale * negative).norm()) / varied if varies else 1.0)
    return float(torch.tensor(misfits).median()) if misfits else 1.0
