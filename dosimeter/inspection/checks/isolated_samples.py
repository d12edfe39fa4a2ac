"""How many of the client's samples the last layer's gradient would show one by one; said, never held against a model."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softmax

from dosimeter.client.losses import as_distribution
from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.received_model import Sent

DOMINATED = 0.99


def measure(sent: Sent) -> Measured:
    """How many samples give at least 99 % of some row of the last layer's gradient. Honest confident models isolate many."""
    if sent.targets is None:
        return "it needs your data"
    if sent.head is None or sent.logits.shape[1] < 2:
        return NO_HEAD
    classes = sent.logits.shape[1]
    error = (softmax(sent.logits.double(), 1) - as_distribution(sent.targets, classes, torch.float64)).abs()  # (B, C)
    weight = error * sent.head.received.double().norm(dim=1)[:, None]
    top, which = weight.max(0)
    lone = which[(top >= DOMINATED * weight.sum(0)) & (top > 1e-9 * weight.max())].unique()
    count = len(lone) if math.isfinite(float(weight.sum())) else 0
    return float(count), f"the last layer's gradient would show {count} of your {len(sent.targets)} samples by themselves"
