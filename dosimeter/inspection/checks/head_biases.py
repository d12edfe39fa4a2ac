"""Biases of the last layer that decide the answer whatever the input (GradFilt)."""

from __future__ import annotations

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.received_model import ReceivedModel


def measure(received_model: ReceivedModel) -> Measured:
    """The span of the last layer's biases in nats: by how much they alone make one class likelier than another."""
    if received_model.head is None:
        return NO_HEAD
    if received_model.head.bias is None:
        return 0.0, "nothing is found to act as a bias of the last layer"
    span = float(received_model.head.bias.max() - received_model.head.bias.min())
    return span, f"the biases of the last layer make one class e^{span:.3g} times likelier than another before any input is seen"
