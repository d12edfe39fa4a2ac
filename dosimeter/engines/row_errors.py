"""By how much declared defenses, and the rounding of weights, may have changed the rows of a layer's update."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.client.training import FedAvg
from dosimeter.engines.sample_share import training_of_one_client, unscaled_layers
from dosimeter.engines.subspace.distortion import distortion_of
from dosimeter.engines.weight_rounding import rounding_of_weights
from dosimeter.interfaces import Public
from dosimeter.types import Update

NOISE_REACH = 6.0  # the largest error of an entry, in standard deviations of the noise


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """What may have been added to each row of one layer."""

    norms: Tensor  # (k,) root mean square
    entries: Tensor  # (k,) the largest in one entry


def row_errors(change: Tensor, weight: Tensor, public: Public) -> RowErrors:
    """The errors of the rows of a layer (k, ...) that was sent as `change`, and whose weights or biases were sent out as `weight`.

    A defense that distorts and does not say how adds infinitely much.
    """
    known = [defense for defense in public.defenses if defense.distorts()]
    rows = change.double().reshape(len(change), -1)
    if any(defense.distortion(change, public) is None for defense in known):
        endless = rows.new_full((len(rows),), math.inf)
        return RowErrors(norms=endless, entries=endless)
    distortion = distortion_of(change, public)
    off = torch.zeros_like(rows)
    noise = float(rounding_of_weights(weight, change, public).max()) if weight.numel() else 0.0
    if distortion is not None:
        reach = torch.maximum(distortion.high - change, change - distortion.low)
        off = torch.where(distortion.live, torch.zeros_like(reach), reach).double().reshape(rows.shape)
        noise = math.hypot(noise, distortion.noise)
    return RowErrors(norms=(off.square() + noise**2).sum(1).sqrt(), entries=off.amax(1) + NOISE_REACH * noise)


def quotients_keep_their_scale(public: Public, sent: Update, names: Collection[str]) -> bool:
    """Whether nothing changed the gradients `names`, of weights and their biases, by factors or errors of their own."""
    training = training_of_one_client(public.training)
    if isinstance(training, FedAvg) and training.autocast is not None:
        return False
    common = all(defense.side != "update" or defense.scaling() in ("none", "update") for defense in public.defenses)
    return common or unscaled_layers(public, sent).issuperset(names)
