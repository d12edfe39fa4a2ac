"""Classes whose samples would send no gradient past the last layer (GradFilt)."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softmax

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.received_model import Sent

SMALLEST = 1e-12
CHUNK = 1024
QUARTILE = 0.25


def measure(sent: Sent) -> Measured:
    """Minus the decimal logarithm of √C ‖Wᵀ(p − y)‖ / (‖W‖ ‖p − y‖), a lower quartile over classes y, at the mean probabilities p.

    In an honest network a sample that is classified wrongly moves the layers below, whatever its class. The classes are those
    of the client's samples, where it has some: rows of classes that nobody has are all alike after training from zero. A last
    layer that is all zero, as fine-tuning begins with, lets no sample through and singles none out; nor do rows that pruning emptied.
    """
    if sent.head is None:
        return NO_HEAD
    weight = sent.head.weight.double()
    classes = len(weight)
    if classes < 3 or not bool(weight.any()):
        return "it needs three classes and a last layer that is not all zero"
    p = softmax(sent.logits.double(), 1).mean(0)
    held = torch.arange(classes, device=weight.device) if sent.targets is None else sent.labels.unique()
    held = held[rows_that_count(weight)[held]]
    if len(held) == 0:
        return "pruning emptied the rows of all your classes"
    ratios = []
    for ids in held.split(CHUNK):
        error = p - torch.eye(classes, dtype=weight.dtype, device=weight.device)[ids]  # (n, C)
        ratios.append((error @ weight).norm(dim=1) / (weight.norm() * error.norm(dim=1)).clamp_min(SMALLEST))
    typical = float(torch.cat(ratios).quantile(QUARTILE)) * classes**0.5
    sentence = (
        f"misclassified samples of a quarter of the classes move the layers below {typical:.2g} times as far as a random head lets them"
    )
    return -math.log10(max(typical, SMALLEST)), sentence
