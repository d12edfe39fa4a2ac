"""How far the update of candidate inputs is from the one that was sent."""

from __future__ import annotations

from torch import Tensor

from dosimeter.interfaces import Exposure
from dosimeter.types import Update

SAME_UPDATE = 3e-5  # relative difference of a module's gradients that single precision explains


def misfit(exposure: Exposure, inputs: Tensor, targets: Tensor) -> float:
    """The distance between the update of a client with these samples and the one that was sent, relative to the latter's norm.

    Training is repeated in the order of the inputs. Where a defense may scale the update, the best factor up to 1 is allowed.
    """
    public, sent = exposure.public, exposure.update
    given = public.training(exposure.model, inputs, targets, public.loss)
    scale = 1.0 if all(defense.scaling() == "none" for defense in public.defenses) else common_factor(given, sent)
    apart = sum(float((scale * given[name].double() - change.double()).square().sum()) for name, change in sent.items())
    size = sum(float(change.double().square().sum()) for change in sent.values())
    return (apart / size) ** 0.5 if size > 0 else 0.0


def common_factor(given: Update, sent: Update) -> float:
    """The factor, at most 1, with which the whole update that is given comes nearest to the one that was sent."""
    product = sum(float((given[name].double() * change.double()).sum()) for name, change in sent.items())
    square = sum(float(given[name].double().square().sum()) for name in sent)
    return min(product / square, 1 + SAME_UPDATE) if square > 0 else 0.0
