"""From features to a reconstruction: decode, refine each sample on its own, refine all jointly, and set the decoder's nulls beside."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.decoder.drawing import DrawsWithDecoder
from dosimeter.engines.decoder.nulls import decoder_nulls
from dosimeter.engines.decoder.refine import Refinement, gain
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import decode_without_slope
from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.options import NonNegativeFloat, NonNegativeInt, PositiveFloat
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Outcome, Reconstruction, Refused

TRIAL = 16  # auxiliary images on which a refinement must prove itself, at most


@dataclass(frozen=True, kw_only=True)
class DecodingAttack(DrawsWithDecoder, MatchingAttack):
    """An attack that recovers features and has a decoder draw them; the decoder is read from a file or trained on the auxiliary data."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS, Knowledge.AUXILIARY})

    fine_tuning_epochs: NonNegativeInt = 0
    refinement_steps: NonNegativeInt = 0  # of each image on its own, towards its feature, where that helps on auxiliary images
    refinement_rate: PositiveFloat = 0.01
    refinement_variation: NonNegativeFloat = 0.01
    joint_steps: NonNegativeInt = 0  # of all images together, towards the whole update

    def decoder_settings(self) -> DecoderSettings:
        return replace(super().decoder_settings(), fine_tuning_epochs=self.fine_tuning_epochs)

    @abstractmethod
    def recover(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        """The features that are drawn."""

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        target, trained = self.obtain_decoder(exposure)
        estimate = self.recover(exposure, labels, rng)
        if len(estimate.features) == 0 or not bool(estimate.features.isfinite().all()):
            raise Refused(f"no features to draw: {estimate.message or 'the recovery left the finite numbers'}")
        features = estimate.features.to(target.device)
        pixels = decode_without_slope(trained.decoder, features)
        notes = [trained.origin, estimate.message]
        if self.refinement_steps:
            refinement = Refinement(
                steps=self.refinement_steps, learning_rate=self.refinement_rate, total_variation=self.refinement_variation
            )
            gained = gain(refinement, target, trained.decoder, _trial(exposure, target, len(features)))
            if gained > 0:
                pixels, _ = refinement(target, pixels, features)
            notes.append(f"refinement {'gains' if gained > 0 else 'not done, as it changes'} {gained:+.1f} dB on auxiliary images")
        found = Reconstruction(
            inputs=from_pixels(pixels, target.normalization),
            labels=estimate.labels if estimate.soft is None else estimate.soft,
            objective=_feature_error(target, pixels, features),
            normalization=target.normalization,
            outcome=estimate.outcome,
            nulls=decoder_nulls(exposure, target, trained.decoder, rng, count=len(features), features=features),
        )
        if self.joint_steps:
            found = refine_jointly(exposure, found, rng, steps=self.joint_steps)
        return replace(found, message="; ".join(note for note in (*notes, found.message) if note))


def refine_jointly(exposure: Exposure, found: Reconstruction, rng: Generator, *, steps: int) -> Reconstruction:
    """The images moved together until their gradient points where the client's does: Inverting Gradients from a good start."""
    size = exposure.public.batch_size
    if size is not None and len(found.inputs) != size:
        return replace(found, message=f"not refined jointly: {len(found.inputs)} of {size} samples were drawn")
    hard = found.labels if found.labels.ndim == 1 else found.labels.argmax(1)
    labels = LabelEstimate(
        counts=torch.bincount(hard, minlength=exposure.public.classes),
        labels=hard,
        soft=found.labels if found.labels.ndim == 2 else None,
    )
    recipe = Recipe(
        distance=Cosine(),
        optimiser=Adam(sign="raw"),
        rate=Rate(start=0.005, shape="cosine"),
        steps=steps,
        priors=(TotalVariation(weight=1e-3),),
    )
    moved = solve(exposure, labels, rng, recipe, start=found.inputs)
    if moved.outcome is not Outcome.COMPLETED:
        return replace(found, message=f"not refined jointly: {moved.message}")
    return replace(moved, nulls=found.nulls, outcome=found.outcome)


def _trial(exposure: Exposure, target: Target, count: int) -> Tensor:
    """Auxiliary pixels (n, *image) in a batch as large as the client's, of at most `TRIAL`."""
    assert exposure.auxiliary is not None
    return target.images(to_pixels(exposure.auxiliary.inputs[: min(count, TRIAL)], target.normalization).clamp(0, 1))


def _feature_error(target: Target, pixels: Tensor, features: Tensor) -> float:
    """How far the features of the drawn images are from those that they were drawn from, relative, on average."""
    drawn = target.features(pixels).to(features)
    error = torch.linalg.vector_norm(drawn - features, dim=1) / torch.linalg.vector_norm(features, dim=1).clamp_min(1e-30)
    return float(error.mean())
