"""What the defenses in force together leave unsaid of the head's gradient."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from dosimeter.engines.subspace.spectrum import ROUNDING_SLACK, added_noise, rounding_unit
from dosimeter.interfaces import Public
from dosimeter.types import Distortion

SEEN_SHARE = 0.5  # the least share of the declared noise that an update must show


def distortion_of(change: Tensor | None, public: Public) -> Distortion | None:
    """What the public defenses are known to have done to a layer that was sent as `change`; None where none says anything."""
    if change is None:
        return None
    each = (defense.distortion(change, public) for defense in public.defenses if defense.distorts())
    known = [distortion for distortion in each if distortion is not None]
    return reduce(_followed_by, known) if known else None


def unmodelled(change: Tensor, public: Public) -> str:
    """The names of the defenses that distort the layer sent as `change` and do not say how, "" where there is none."""
    return ", ".join(defense.name for defense in public.defenses if defense.distorts() and defense.distortion(change, public) is None)


def missing_noise(change: Tensor, public: Public) -> str:
    """A sentence if the declared defenses add more independent noise to the head's gradient (C, H) than it shows; "" if not.

    The rows of the gradient sum to zero, and those of the noise do not. A defense that declares noise and does something else is no
    premise of a proof. Nothing is known of noise that was scaled later.
    """
    distortion = distortion_of(change, public)
    if distortion is None or _scaled_after_noise(public):
        return ""
    declared = distortion.noise * float(distortion.live.to(change).mean().sqrt())
    rounding = rounding_unit(change) * float(change.square().mean().sqrt())
    if declared <= ROUNDING_SLACK * rounding or added_noise(change) >= SEEN_SHARE * declared:
        return ""
    return f"the defenses declare noise of {declared:.2g} an entry, and the update shows {added_noise(change):.2g}"


def _scaled_after_noise(public: Public) -> bool:
    last = max(place for place, defense in enumerate(public.defenses) if defense.distorts())
    return any(defense.scaling() != "none" for defense in public.defenses[last + 1 :])


def _followed_by(first: Distortion, second: Distortion) -> Distortion:
    """Noise adds up, an entry is live where it is so in both, and a bound of the second replaces one of the first."""
    return Distortion(
        noise=math.sqrt(first.noise**2 + second.noise**2),
        live=first.live & second.live,
        low=torch.where(second.low.isfinite(), second.low, first.low),
        high=torch.where(second.high.isfinite(), second.high, first.high),
    )
