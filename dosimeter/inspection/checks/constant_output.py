"""The same probabilities for every input (GradFilt)."""

from __future__ import annotations

import math

from torch.nn.functional import softmax

from dosimeter.inspection.sent import Sent

SMALLEST = 1e-12
INDISTINCT = 1e-6  # relative distance of features below which rounding is all that tells inputs apart


def measure(sent: Sent) -> tuple[float, str] | None:
    """Minus the decimal logarithm of the largest difference that inputs make to any class's probability.

    Relative to the difference that a typical row of the last layer makes of them, up to 1: an untrained network, whose
    features are all alike or all small, and a last layer that is all zero, as fine-tuning begins with, hide nothing.
    """
    if sent.head is None or len(sent.logits) < 2 or sent.logits.shape[1] < 2:
        return None
    p = softmax(sent.logits.double(), 1)
    spread = float((p.amax(0) - p.amin(0)).max())
    features = sent.head.received.double()
    apart = float((features - features.mean(0)).norm(dim=1).max())
    if apart <= INDISTINCT * float(features.norm(dim=1).max()):
        return None
    reach = apart * float(sent.head.weight.double().square().sum(1).mean().sqrt())  # logits that a typical row moves by
    if reach < SMALLEST:
        return None
    return -math.log10(max(spread / min(reach, 1.0), SMALLEST)), f"different inputs change no class's probability by more than {spread:.2g}"
