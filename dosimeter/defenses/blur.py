"""Gaussian blur of the inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv1d, pad

from dosimeter.interfaces import Client, Defense
from dosimeter.options import FiniteFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, ProtectedUnit, Refused


@DEFENSES.register("blur")
@dataclass(frozen=True, kw_only=True)
class Blur(Defense):
    """Trains on images blurred by a Gaussian of `sigma` pixels.

    Fan, "Differential Privacy for Image Publication", TPDP 2019 (thesis Section 2.3.1), without its noise and hence without its ε.
    The kernel reaches four standard deviations. The edge pixels are repeated beyond the edge.
    """

    side: ClassVar = "data"
    changes_pixels = True
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset()  # each sample is blurred by itself
    promise: ClassVar[str] = "fine detail is damped before training, but deconvolution brings back what noise does not cover"
    breaks: ClassVar[str] = "accuracy where the classes differ in detail"

    sigma: FiniteFloat

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs = client.batch.inputs
        if self.sigma == 0:
            return client
        if inputs.ndim != 4:
            raise Refused(f"blur needs images (channels, height, width); these inputs have shape {tuple(inputs.shape[1:])}")
        blurred = self._along_rows(self._along_rows(inputs).transpose(2, 3)).transpose(2, 3)
        return replace(client, batch=Batch(blurred.contiguous(), client.batch.targets))

    def _along_rows(self, images: Tensor) -> Tensor:
        """(B, channels, height, width), blurred along its width."""
        radius = math.ceil(4 * self.sigma)
        offsets = torch.arange(-radius, radius + 1, dtype=torch.float64, device=images.device)
        kernel = torch.exp(-(offsets**2) / (2 * self.sigma**2))
        rows = pad(images.reshape(-1, 1, images.shape[-1]), (radius, radius), mode="replicate")
        return conv1d(rows, (kernel / kernel.sum()).to(images.dtype)[None, None]).view_as(images)
