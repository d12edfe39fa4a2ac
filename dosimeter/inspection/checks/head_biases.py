"""Biases of the last layer that decide the answer whatever the input (GradFilt)."""

from __future__ import annotations

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.received_model import Sent


def measure(sent: Sent) -> Measured:
    """The span of the last layer's biases, in nats: what they alone make one class likelier than another by."""
    if sent.head is None:
        return NO_HEAD
    if sent.head.bias is None:
        return 0.0, "nothing is found to act as a bias of the last layer"
    span = float(sent.head.bias.max() - sent.head.bias.min())
    return span, f"the biases of the last layer make one class e^{span:.3g} times likelier than another before any input is seen"
