"""The losses under which the sign of a gradient row shows whether its class is present."""

from __future__ import annotations

from dosimeter.client.losses import CrossEntropy
from dosimeter.interfaces import Exposure
from dosimeter.types import Refused


def require_sign_rule(exposure: Exposure, method: str) -> None:
    """Refuse losses whose gradient at an absent class's logit can be negative: then a negative sign does not prove presence."""
    loss = exposure.public.loss
    if not loss.shift_invariant:
        raise Refused(f"{method} needs a softmax loss, under which only a sample's own class has a negative gradient; this is {loss.name}")
    if isinstance(loss, CrossEntropy) and loss.smoothing > 0:
        raise Refused(
            f"{method} reads presence off signs, and with label smoothing {loss.smoothing:g} absent classes can be negative too; "
            "ilrg and posterior allow for smoothing"
        )
    if exposure.public.classes < 2:
        raise Refused(f"{method} needs at least two logits; this model has one")
