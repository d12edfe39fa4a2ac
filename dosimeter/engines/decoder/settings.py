"""How a decoder is built and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dosimeter.engines.decoder.network import Shape, default_width
from dosimeter.engines.decoder.target import Target
from dosimeter.options import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, check_fields


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """How a decoder is built and trained; part of the key under which it is kept.

    Xue et al. train 30 epochs of Adam at 1e-4 on the squared error in batches of 24; RGLA goes on with −PSNR + 10 (1 − SSIM) +
    10 LPIPS. Departures: a larger step size that rises and falls, mirrored images besides, and batches of several sizes for the
    target's batch norm, since the client's is unknown.
    """

    width: PositiveInt | None = None  # channels of the first stage; none: by the size of the images, 512 at 128 pixels and more
    finest: PositiveInt | None = None  # pixels a side that are drawn before scaling up, where auxiliary images hold no more; none: all
    epochs: PositiveInt = 30
    fine_tuning_epochs: NonNegativeInt = 0
    seconds: PositiveFloat | None = None  # the training ends here if its epochs have not, its step size fallen to nothing
    batch_size: PositiveInt = 24
    learning_rate: PositiveFloat = 1e-3
    client_batch_sizes: tuple[PositiveInt, ...] = (8, 16, 32, 64)  # drawn from, where the client trains in train mode
    mirrored: bool = True
    mosaics: Fraction = 0.0  # share of batches made of four images side by side, with finer detail than a small one scaled up has
    sharpened: Fraction = 0.0  # share of batches with the edges sharpened that scaling up has blurred
    coloured: Fraction = 0.0  # share of batches with colours weaker and stronger than the auxiliary images have, and exchanged
    reuse: PositiveInt = 1  # epochs that the same features are trained on, where all of them fit into memory
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.client_batch_sizes:
            raise ValueError("client_batch_sizes: expected at least one")

    def shape_for(self, target: Target) -> Shape:
        """The decoder that these settings build for a model."""
        width = self.width or default_width(target.image_shape)
        return Shape(feature=target.feature_shape, image=target.image_shape, width=width, finest=self.finest)
