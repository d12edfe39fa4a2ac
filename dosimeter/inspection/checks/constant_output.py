"""The same probabilities for every input (GradFilt)."""

from __future__ import annotations

import math

from torch.nn.functional import softmax

from dosimeter.inspection.sent import Sent

SMALLEST = 1e-12
INDISTINCT = 1e-6  # relative distance of features below which rounding is all that tells inputs apart


def measure(sent: Sent) -> tuple[float, str] | None:
    """Minus the decimal logarithm of the largest difference that inputs make to any class's probability.

    Relative to the largest that they make to a class's logit, up to 1: an untrained network, whose features are all alike or
    all small, a last layer that is all zero, as fine-tuning begins with, and one that pruning cut off from its features hide
    nothing. A filter's logits move, those of its targets, and its probabilities do not.
    """
    if sent.head is None or len(sent.logits) < 2 or sent.logits.shape[1] < 2:
        return None
    p = softmax(sent.logits.double(), 1)
    spread = float((p.amax(0) - p.amin(0)).max())
    features = sent.head.received.double()
    apart = features - features.mean(0)
    if float(apart.norm(dim=1).max()) <= INDISTINCT * float(features.norm(dim=1).max()):
        return None
    moved = apart @ sent.head.weight.double().T  # (B, C)
    reach = float((moved.amax(0) - moved.amin(0)).max())
    if reach < SMALLEST:
        return None
    return -math.log10(max(spread / min(reach, 1.0), SMALLEST)), f"different inputs change no class's probability by more than {spread:.2g}"
