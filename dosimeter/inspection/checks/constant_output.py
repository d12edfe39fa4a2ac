"""The same probabilities for every input (GradFilt)."""

from __future__ import annotations

import math

from torch.nn.functional import softmax

from dosimeter.inspection.sent import Sent

SMALLEST = 1e-12
INDISTINCT = 1e-6  # relative distance of features below which rounding is all that tells inputs apart


def measure(sent: Sent) -> tuple[float, str] | None:
    """Minus the decimal logarithm of the largest difference that inputs make to any class's probability.

    Relative to how far they differ at the last layer's entrance: an untrained or starved network is constant there already.
    """
    if len(sent.logits) < 2 or sent.logits.shape[1] < 2:
        return None
    p = softmax(sent.logits.double(), 1)
    spread = float((p.amax(0) - p.amin(0)).max())
    features = sent.head.received.double()
    apart = float((features - features.mean(0)).norm(dim=1).max() / features.norm(dim=1).max().clamp_min(SMALLEST))
    if apart < INDISTINCT:
        return None
    return -math.log10(max(spread / apart, SMALLEST)), f"different inputs change no class's probability by more than {spread:.2g}"
