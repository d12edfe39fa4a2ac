"""The same probabilities for every input (GradFilt)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softmax

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.received_model import Sent

SMALLEST = 1e-12
INDISTINCT = 1e-6  # relative distance of features, or of logits, below which rounding is all that tells inputs apart
EXPLAINED = 1e-3  # how far the probabilities may be from those that the last layer gives


def measure(sent: Sent) -> Measured:
    """Minus the decimal logarithm of the largest difference that inputs make to any class's probability.

    Relative to the largest that they make to a class's logit, up to 1: an untrained network, whose features are all alike or
    all small, a last layer that is all zero, as fine-tuning begins with, and one that pruning cut off from its features hide
    nothing. A filter's logits move, those of its targets, and its probabilities do not. Features of zero, which leave the
    biases alone to decide, count as one more input: they change what a network is sure of and not what a filter is.
    """
    if len(sent.logits) < 2 or sent.logits.shape[1] < 2:
        return "it needs two samples and two classes"
    logits = sent.logits.double()
    reach = _reach(sent, logits)
    if reach < SMALLEST:
        return "no logit depends on the input, as with a last layer of zeros, which hides a filter's marks too"
    p = softmax(torch.cat([logits, *_of_no_features(sent, logits)]), 1)
    spread = float((p.amax(0) - p.amin(0)).max())
    return -math.log10(max(spread / min(reach, 1.0), SMALLEST)), f"different inputs change no class's probability by more than {spread:.2g}"


def _of_no_features(sent: Sent, logits: Tensor) -> list[Tensor]:
    """The logits (1, C) of features that are all zero, where a last layer is found that explains the others."""
    if sent.head is None:
        return []
    bias = logits.new_zeros(logits.shape[1]) if sent.head.bias is None else sent.head.bias.double()
    explained = sent.head.received.double() @ sent.head.weight.double().T + bias
    same = float((softmax(explained, 1) - softmax(logits, 1)).abs().max()) <= EXPLAINED
    return [bias[None]] if same else []


def _reach(sent: Sent, logits: Tensor) -> float:
    """The largest difference that inputs make to a class's logit, beyond rounding."""
    if sent.head is None:
        moved = logits.amax(0) - logits.amin(0)
        return float(moved.where(moved > INDISTINCT * logits.abs().amax(0), 0.0).max())
    features = sent.head.received.double()
    apart = features - features.mean(0)
    if float(apart.norm(dim=1).max()) <= INDISTINCT * float(features.norm(dim=1).max()):
        return 0.0
    moved = apart @ sent.head.weight.double().T  # (B, C)
    return float((moved.amax(0) - moved.amin(0)).max())
