"""Biases of the last layer that decide the answer whatever the input (GradFilt)."""

from __future__ import annotations

from dosimeter.inspection.sent import Sent


def measure(sent: Sent) -> tuple[float, str] | None:
    """The span of the last layer's biases, in nats: what they alone make one class likelier than another by."""
    if sent.head is None or sent.head.bias is None:
        return None
    span = float(sent.head.bias.max() - sent.head.bias.min())
    return span, f"the biases of the last layer make one class e^{span:.3g} times likelier than another before any input is seen"
