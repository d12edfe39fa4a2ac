"""A linear layer before the network proper that hands the input on almost unchanged (imprint, trap weights)."""

from __future__ import annotations

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.received_model import ReceivedModel


def measure(received_model: ReceivedModel) -> Measured:
    """The largest correlation between the input and what a layer receives after a linear layer has taken the whole input."""
    flat = received_model.inputs.flatten(1).double()
    flat = flat - flat.mean()
    largest = 0.0
    for received in received_model.later_inputs:
        other = received.double() - received.double().mean()
        largest = max(largest, float((flat * other).sum() / (flat.norm() * other.norm()).clamp_min(1e-30)))
    if largest == 0.0:
        return 0.0, "no linear layer sees the whole input before the network proper does"
    return largest, f"a linear layer sees the whole input, and a later layer still gets that input (correlation {largest:.4f})"
