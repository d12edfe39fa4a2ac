"""Classes whose samples would send no gradient past the last layer (GradFilt)."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softmax

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.received_model import ReceivedModel

SMALLEST_RATIO = 1e-12  # smaller ones count as this
CHUNK = 1024  # classes at a time
QUARTILE = 0.25


def measure(received_model: ReceivedModel) -> Measured:
    """Minus the decimal logarithm of √C ‖Wᵀ(p − y)‖ / (‖W‖ ‖p − y‖): the lower quartile over classes y, at the mean probabilities p.

    In an honest network a misclassified sample moves the layers below, whatever its class. The classes are those of the client's
    samples where it has some, since rows of classes that nobody has stay alike after training from zero. A last layer of zeros,
    with which fine-tuning begins, singles no class out. Neither do rows that pruning emptied.
    """
    if received_model.head is None:
        return NO_HEAD
    weight = received_model.head.weight.double()
    classes = len(weight)
    if classes < 3 or not bool(weight.any()):
        return "it needs three classes and a last layer that is not all zero"
    p = softmax(received_model.logits.double(), 1).mean(0)
    held = torch.arange(classes, device=weight.device) if received_model.targets is None else received_model.labels.unique()
    held = held[rows_that_count(weight)[held]]
    if len(held) == 0:
        return "pruning emptied the rows of all your classes"
    ratios = []
    for ids in held.split(CHUNK):
        error = p - torch.eye(classes, dtype=weight.dtype, device=weight.device)[ids]  # (n, C)
        ratios.append((error @ weight).norm(dim=1) / (weight.norm() * error.norm(dim=1)).clamp_min(SMALLEST_RATIO))
    typical = float(torch.cat(ratios).quantile(QUARTILE)) * classes**0.5
    sentence = (
        f"misclassified samples of a quarter of the classes move the layers below {typical:.2g} times as far as a random head lets them"
    )
    return -math.log10(max(typical, SMALLEST_RATIO)), sentence
