"""The options of an attack that draws with a decoder, and what its training will take."""

from __future__ import annotations

from dataclasses import dataclass

from dosimeter.engines.decoder.cache import StoredDecoder, kept_decoder, obtain
from dosimeter.engines.decoder.cost import Cost, training_cost
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.interfaces import Attack, Exposure
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class DrawsWithDecoder(Attack):
    """An attack that draws with a decoder: read from a file, found in the user's cache, or trained on the auxiliary data."""

    decoder: str | None = None  # a file of `dosimeter generator train`; none: kept, or trained now
    width: PositiveInt | None = None  # none: by the size of the images, 512 at 224 pixels
    epochs: PositiveInt = 30
    training_seconds: PositiveFloat | None = None  # the training ends here if its epochs have not; none: as long as they take

    def decoder_settings(self) -> DecoderSettings:
        return DecoderSettings(width=self.width, epochs=self.epochs, seconds=self.training_seconds)

    def obtain_decoder(self, exposure: Exposure) -> tuple[Target, StoredDecoder]:
        return obtain(exposure, self.decoder_settings(), self.decoder)

    def cost_of_training(self, exposure: Exposure) -> Cost | None:
        """What the training takes that a call starts with; None where the decoder is there, or cannot be trained."""
        if self.decoder is not None or exposure.auxiliary is None:
            return None
        settings = self.decoder_settings()
        try:
            target = Target.of(exposure)
        except Refused:  # what it says when its turn comes
            return None
        if kept_decoder(exposure, target, settings) is not None:
            return None
        return training_cost(target, len(exposure.auxiliary.inputs), settings)
