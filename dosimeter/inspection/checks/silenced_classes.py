"""Classes whose samples would send no gradient past the last layer (GradFilt)."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softmax

from dosimeter.inspection.sent import Sent

SMALLEST = 1e-12
CHUNK = 1024


def measure(sent: Sent) -> tuple[float, str] | None:
    """Minus the decimal logarithm of √C ‖Wᵀ(p − y)‖ / (‖W‖ ‖p − y‖), the median over classes y, at the mean probabilities p.

    In an honest network a sample that is classified wrongly moves the layers below, whatever its class.
    """
    weight = sent.head.weight.double()
    classes = len(weight)
    if classes < 3:
        return None
    p = softmax(sent.logits.double(), 1).mean(0)
    ratios = []
    for ids in torch.arange(classes, device=weight.device).split(CHUNK):
        error = p - torch.eye(classes, dtype=weight.dtype, device=weight.device)[ids]  # (n, C)
        ratios.append((error @ weight).norm(dim=1) / (weight.norm() * error.norm(dim=1)).clamp_min(SMALLEST))
    typical = float(torch.cat(ratios).median()) * classes**0.5
    return -math.log10(
        max(typical, SMALLEST)
    ), f"a misclassified sample of a typical class moves the layers below {typical:.2g} times as much as a random head would let it"
