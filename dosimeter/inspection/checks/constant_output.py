"""The same probabilities for every input (GradFilt)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softmax

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.received_model import ReceivedModel

SMALLEST_CHANGE = 1e-12  # of a probability or a logit: smaller ones count as this
ROUNDING = 1e-6  # relative difference of features, or of logits, that may be rounding alone
EXPLAINED = 1e-3  # how far the model's probabilities may be from those of the layer that was found to be its last


def measure(received_model: ReceivedModel) -> Measured:
    """Minus the decimal logarithm of the largest difference between inputs in any class's probability.

    The difference is divided by the largest difference in any logit, up to 1. So an untrained network with features that are all
    small passes, and so does a last layer of zeros, with which fine-tuning begins, or one that pruning cut off from its features.
    In a filter, inputs change the targets' logits, and no probability. Features of zero count as one more input. They change the
    probabilities of a confident network, but not those of a filter, whose biases decide alone.
    """
    if len(received_model.logits) < 2 or received_model.logits.shape[1] < 2:
        return "it needs two samples and two classes"
    logits = received_model.logits.double()
    reach = _reach(received_model, logits)
    if reach < SMALLEST_CHANGE:
        return "no logit depends on the input, as with a last layer of zeros, which hides a filter's marks too"
    p = softmax(torch.cat([logits, *_of_no_features(received_model, logits)]), 1)
    spread = float((p.amax(0) - p.amin(0)).max())
    return -math.log10(
        max(spread / min(reach, 1.0), SMALLEST_CHANGE)
    ), f"different inputs change no class's probability by more than {spread:.2g}"


def _of_no_features(received_model: ReceivedModel, logits: Tensor) -> list[Tensor]:
    """The logits (1, C) of features that are all zero; none where the last layer found does not explain the model's probabilities."""
    if received_model.head is None:
        return []
    bias = logits.new_zeros(logits.shape[1]) if received_model.head.bias is None else received_model.head.bias.double()
    explained = received_model.head.received.double() @ received_model.head.weight.double().T + bias
    same = float((softmax(explained, 1) - softmax(logits, 1)).abs().max()) <= EXPLAINED
    return [bias[None]] if same else []


def _reach(received_model: ReceivedModel, logits: Tensor) -> float:
    """The largest difference between inputs in any class's logit, beyond rounding."""
    if received_model.head is None:
        moved = logits.amax(0) - logits.amin(0)
        return float(moved.where(moved > ROUNDING * logits.abs().amax(0), 0.0).max())
    features = received_model.head.received.double()
    apart = features - features.mean(0)
    if float(apart.norm(dim=1).max()) <= ROUNDING * float(features.norm(dim=1).max()):
        return 0.0
    moved = apart @ received_model.head.weight.double().T  # (B, C)
    return float((moved.amax(0) - moved.amin(0)).max())
