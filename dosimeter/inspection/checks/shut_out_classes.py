"""Classes that the last layer's biases put far below all others (GradFilt)."""

from __future__ import annotations

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.received_model import Sent


def measure(sent: Sent) -> Measured:
    """The widest gap in the sorted biases of the last layer that has at most half of the classes below it, in nats.

    Rare classes make biases fall off step by step, and a dominant one stands above the others; a filter drops its targets
    at once below all others.
    """
    if sent.head is None:
        return NO_HEAD
    bias = sent.head.bias
    if bias is None:
        return 0.0, "nothing is found to act as a bias of the last layer"
    if len(bias) < 3:
        return "it needs three classes"
    ordered = bias.double().sort().values
    gap = float(ordered.diff()[: len(bias) // 2].max())
    below = int(ordered.diff()[: len(bias) // 2].argmax()) + 1
    return gap, f"the biases of the last layer put {below} of {len(bias)} classes {gap:.3g} nats below all others"
