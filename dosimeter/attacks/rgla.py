"""RGLA: a decoder draws each sample's feature, samples of one label included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Generator

from dosimeter.engines.decoder.decoding import DecodingAttack
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.options import PositiveInt
from dosimeter.randomness import generator
from dosimeter.registry import ATTACKS, FEATURES
from dosimeter.types import FeatureEstimate, LabelEstimate, Refused


@ATTACKS.register("rgla")
@dataclass(frozen=True, kw_only=True)
class RGLA(DecodingAttack):
    """Recovers the feature of every sample from the head's gradient and has a decoder, trained on auxiliary images, draw it.

    "RGLA: Reverse Gradient Leakage Attack using Inverted Cross-Entropy Loss Function", 2023: Algorithm 1. `features="rgla"` finds the
    logits by descent, as published, and needs labels and a bias; `features="released"` does so by the loop of the released code.
    `features="subspace"`, ours, takes the gradient apart exactly, also without labels and without the batch size.
    Departures: those of the decoder (see dosimeter/engines/decoder). Nothing is reordered by the truth before it is scored.
    `refinement_steps`, ours, moves each image until the model gives it its feature, unless that makes auxiliary images worse.
    `joint_steps`, ours, moves all images together towards the whole update.
    """

    quick: ClassVar[dict[str, Any]] = {"features": "subspace", "width": 32}

    features: Literal["rgla", "released", "subspace"] = "rgla"
    steps: PositiveInt | None = None  # of the published recovery; none: its own default

    def recover(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        own = generator(rng.initial_seed(), f"features {self.features}", rng.device)
        if self.features == "subspace":
            return FEATURES.build("subspace")(exposure, labels, own)
        self._check(exposure, labels)
        options = {"steps": self.steps} if self.steps is not None else {}
        form = "released" if self.features == "released" else "chosen"
        return FEATURES.build("rgla", form=form, **options)(exposure, labels, own)

    def _check(self, exposure: Exposure, labels: LabelEstimate | None) -> None:
        """Check what the published recovery needs beyond `subspace`."""
        if labels is None:
            needed = f'rgla with features="{self.features}" needs labels'
            raise Refused(f'{needed}: pass labels=, or take features="subspace", which does without')
        if find_head(exposure).bias_gradient is None:
            raise Refused(f'rgla with features="{self.features}" needs the head bias gradient; features="subspace" does without')
