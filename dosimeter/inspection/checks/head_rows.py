"""Rows of the last layer that a server zeroed or scaled (GradFilt)."""

from __future__ import annotations

import torch
from torch.nn.functional import softmax

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.received_model import ReceivedModel

SMALLEST_RATIO = 1e-9  # of a row's distance to the largest one
FEWEST_CLASSES = 3
QUARTILE = 0.25


def measure(received_model: ReceivedModel) -> Measured:
    """How many times farther the heaviest class's samples move the layers below than those of the lower quartile's class.

    A misclassified sample moves these layers in proportion to its row's distance from the mean row Σ p_k W_k. So rows that
    are all alike count as zero rows. The classes are the client's own where it has enough of them. Rows that pruning emptied are left out.
    """
    if received_model.head is None:
        return NO_HEAD
    weight = received_model.head.weight.double()
    rows = (weight - softmax(received_model.logits.double(), 1).mean(0) @ weight).norm(dim=1)  # (C,)
    counting = rows_that_count(weight)
    if received_model.targets is not None and len(held := received_model.labels.unique()) >= FEWEST_CLASSES:
        rows, counting = rows[held], counting[held]
    rows = rows[counting]
    if len(rows) < FEWEST_CLASSES or not bool(weight.any()):
        return f"it needs {FEWEST_CLASSES} classes with rows that pruning left"
    ratio = float(rows.max() / torch.maximum(rows.quantile(QUARTILE), SMALLEST_RATIO * rows.max()).clamp_min(1e-300))
    return ratio, f"the heaviest row of the last layer moves the layers below {ratio:.3g} times as far as its lighter rows do"
