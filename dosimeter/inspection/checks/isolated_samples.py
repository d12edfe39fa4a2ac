"""How many of the client's samples the last layer's gradient would show one by one: reported, never suspicious."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softmax

from dosimeter.client.losses import as_distribution
from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.received_model import ReceivedModel

DOMINATED = 0.99  # share of a row's gradient from which on the row shows one sample


def measure(received_model: ReceivedModel) -> Measured:
    """How many samples make up at least 99 % of some row of the last layer's gradient. Honest confident models isolate many."""
    if received_model.targets is None:
        return "it needs your data"
    if received_model.head is None or received_model.logits.shape[1] < 2:
        return NO_HEAD
    classes = received_model.logits.shape[1]
    error = (softmax(received_model.logits.double(), 1) - as_distribution(received_model.targets, classes, torch.float64)).abs()  # (B, C)
    weight = error * received_model.head.received.double().norm(dim=1)[:, None]
    top, which = weight.max(0)
    lone = which[(top >= DOMINATED * weight.sum(0)) & (top > 1e-9 * weight.max())].unique()
    count = len(lone) if math.isfinite(float(weight.sum())) else 0
    return float(count), f"the last layer's gradient would show {count} of your {len(received_model.targets)} samples by themselves"
