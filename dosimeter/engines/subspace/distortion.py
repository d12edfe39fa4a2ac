"""What the defenses in force together leave unsaid of the head's gradient."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from dosimeter.interfaces import Public
from dosimeter.types import Distortion


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


def _followed_by(first: Distortion, second: Distortion) -> Distortion:
    """Noise adds up, an entry is live where it is so in both, and a bound of the second replaces one of the first."""
    return Distortion(
        noise=math.sqrt(first.noise**2 + second.noise**2),
        live=first.live & second.live,
        low=torch.where(second.low.isfinite(), second.low, first.low),
        high=torch.where(second.high.isfinite(), second.high, first.high),
    )
