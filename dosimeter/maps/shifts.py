"""Activation maps of the whole batch from the shifts in a convolution's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.downward.carrying import carry_maps
from dosimeter.engines.shifts.recover import recover_maps
from dosimeter.interfaces import Exposure, MapRecovery
from dosimeter.registry import MAPS
from dosimeter.types import MapEstimate, Refused


@MAPS.register("shifts")
@dataclass(frozen=True, kw_only=True)
class Shifts(MapRecovery):
    """Reads the inputs of a convolution, sample by sample and in place, off the convolution's gradient.

    Ours. The gradient of a convolution holds one matrix for each offset of its kernel, and these matrices are shifts of one
    another. Linear algebra tells the number of samples and the position of every entry. The zeros of the ReLU tell the samples
    apart, and bias gradients tell their scale. No labels are needed, and nothing is optimised. A `layer` whose own gradient does not show
    its maps gets them from another layer, where they follow from that layer's (see `carrying`).
    """

    layer: str | None = None  # by its name in the model; None: the first one whose samples are all certified

    def __call__(self, exposure: Exposure, rng: Generator) -> MapEstimate:
        seed = int(torch.randint(2**31, (1,), generator=rng, device=rng.device))
        try:
            return recover_maps(exposure, self.layer, seed=seed)
        except Refused as own:
            if self.layer is None or "layers" not in own.details:
                raise
            return carry_maps(exposure, self.layer, own, seed=seed)
