"""Classes that the last layer's biases put far below all others (GradFilt)."""

from __future__ import annotations

from dosimeter.inspection.finding import NO_HEAD, Measured
from dosimeter.inspection.received_model import ReceivedModel


def measure(received_model: ReceivedModel) -> Measured:
    """The widest gap, in nats, among the lower half of the last layer's sorted biases.

    Rare classes make the biases fall off step by step, and a dominant class stands above all others. A filter, in contrast,
    puts its targets far below all others.
    """
    if received_model.head is None:
        return NO_HEAD
    bias = received_model.head.bias
    if bias is None:
        return 0.0, "nothing is found to act as a bias of the last layer"
    if len(bias) < 3:
        return "it needs three classes"
    ordered = bias.double().sort().values
    gap = float(ordered.diff()[: len(bias) // 2].max())
    below = int(ordered.diff()[: len(bias) // 2].argmax()) + 1
    return gap, f"the biases of the last layer put {below} of {len(bias)} classes {gap:.3g} nats below all others"
