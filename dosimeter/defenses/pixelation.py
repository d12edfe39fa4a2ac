"""Pixelation of the inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Generator
from torch.nn.functional import avg_pool2d

from dosimeter.interfaces import Client, Defense
from dosimeter.options import PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, ProtectedUnit, Refused


@DEFENSES.register("pixelation")
@dataclass(frozen=True, kw_only=True)
class Pixelation(Defense):
    """Trains on images whose `block` × `block` squares are replaced by their means.

    Fan, "Image Pixelization with Differential Privacy", DBSec 2018 (thesis Table 2.2): its grid of cell averages. Squares that the
    right or bottom edge cuts average their remaining pixels.
    Departure: no Laplace noise on the averages, hence no ε; `dp_pixelation` has it.
    """

    side: ClassVar = "data"
    changes_pixels = True
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset()  # each sample is pixelated by itself
    promise: ClassVar[str] = "details finer than a block never enter training, so no update can hold them; the block means may leak"
    breaks: ClassVar[str] = "accuracy where the classes differ in detail"

    block: PositiveInt

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs = client.batch.inputs
        if self.block == 1:
            return client
        if inputs.ndim != 4:
            raise Refused(f"pixelation needs images (channels, height, width); these inputs have shape {tuple(inputs.shape[1:])}")
        height, width = inputs.shape[2:]
        means = avg_pool2d(inputs, (min(self.block, height), min(self.block, width)), ceil_mode=True)
        pixelated = means.repeat_interleave(self.block, 2)[:, :, :height].repeat_interleave(self.block, 3)[..., :width]
        return replace(client, batch=Batch(pixelated.contiguous(), client.batch.targets))
