"""Rows of the last layer that were zeroed or scaled (GradFilt)."""

from __future__ import annotations

import torch
from torch.nn.functional import softmax

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.received_model import Sent

FLOOR = 1e-9
FEWEST = 3  # classes
QUARTILE = 0.25


def measure(sent: Sent) -> Measured:
    """How many times a sample of one class moves the layers below as far as one of a lighter class, the lower quartile.

    A misclassified sample moves them by its row's distance from the mean row Σ p_k W_k, so that rows that are all alike are as
    good as zero. The classes are the client's own, where it has enough of them, without rows that pruning emptied.
    """
    if sent.head is None:
        return NO_HEAD
    weight = sent.head.weight.double()
    rows = (weight - softmax(sent.logits.double(), 1).mean(0) @ weight).norm(dim=1)  # (C,)
    counting = rows_that_count(weight)
    if sent.targets is not None and len(held := sent.labels.unique()) >= FEWEST:
        rows, counting = rows[held], counting[held]
    rows = rows[counting]
    if len(rows) < FEWEST or not bool(weight.any()):
        return f"it needs {FEWEST} classes with rows that pruning left"
    ratio = float(rows.max() / torch.maximum(rows.quantile(QUARTILE), FLOOR * rows.max()).clamp_min(1e-300))
    return ratio, f"the heaviest row of the last layer moves the layers below {ratio:.3g} times as far as its lighter rows do"
