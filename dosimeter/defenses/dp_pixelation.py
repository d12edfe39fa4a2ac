"""Pixelation of the inputs with Laplace noise on the squares' means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Generator
from torch.nn.functional import avg_pool2d

from dosimeter.defenses.laplace_noise import standard_laplace
from dosimeter.interfaces import Client, Defense
from dosimeter.options import FiniteFloat, OptionError, PositiveFloat, PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, ProtectedUnit, Refused


@DEFENSES.register("dp_pixelation")
@dataclass(frozen=True, kw_only=True)
class DPPixelation(Defense):
    """Trains on images whose `block` × `block` squares are replaced by their means plus Laplace noise.

    Fan, "Image Pixelization with Differential Privacy", DBSec 2018 (thesis Table 2.2): with pixels in [low, high], two images that differ
    in at most `neighbours` pixels have means whose differences add up to at most (high − low) · neighbours / block². Laplace noise of that
    size over `epsilon` hides which of the two was used. Inputs are cut to the range first.
    Departure: every colour channel is an image of its own. The ε is that of `neighbours` pixels of one channel and not of a sample, so the
    privacy accountant does not count it. A square that the edge cuts averages its remaining pixels: it is refused, since its mean is
    more sensitive.
    """

    side: ClassVar = "data"
    changes_pixels = True
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset()  # each sample is pixelated by itself
    promise: ClassVar[str] = "which of two images that differ in a few pixels was used stays uncertain by ε; nothing for a whole image"
    breaks: ClassVar[str] = "accuracy where the classes differ in detail, and more the smaller ε is"

    block: PositiveInt
    epsilon: PositiveFloat
    neighbours: PositiveInt = 16
    low: FiniteFloat = 0.0
    high: FiniteFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high > self.low:
            raise OptionError("high", f"expected more than low = {self.low:g}, got {self.high:g}")

    def distorts(self) -> bool:
        return False

    def scale(self) -> float:
        """The scale of the Laplace noise: the sensitivity over ε."""
        return (self.high - self.low) * self.neighbours / (self.block**2 * self.epsilon)

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs = client.batch.inputs
        if inputs.ndim != 4 or inputs.shape[2] % self.block or inputs.shape[3] % self.block:
            shape = tuple(inputs.shape[1:])
            raise Refused(f"dp_pixelation needs images whose sides are multiples of block = {self.block}; these inputs have shape {shape}")
        means = avg_pool2d(inputs.clamp(self.low, self.high), self.block)
        noisy = means + self.scale() * standard_laplace(means, rng)
        drawn = noisy.repeat_interleave(self.block, 2).repeat_interleave(self.block, 3)
        return replace(client, batch=Batch(drawn.contiguous(), client.batch.targets))
