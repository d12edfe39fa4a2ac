"""GradInversion: match the update under image, batch-norm and group-consistency priors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import Prior, SquaredNorm, TotalVariation, batch_norm_prior
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction


@ATTACKS.register("gradinversion")
@dataclass(frozen=True, kw_only=True)
class GradInversion(MatchingAttack):
    """Runs several seeds that must match the gradient, look natural to the batch norms, and agree with each other.

    Yin et al., "See through Gradients: Image Batch Recovery via GradInversion", CVPR 2021: Eqs. (1), (8)-(11). Squared error of the update,
    total variation, ℓ2 norm, batch-norm statistics and group consistency over seeds; Adam with a warm-up and a cosine decay. No
    public code exists.
    `pixel_noise` is the paper's α_n (.2 there): after each step, noise in lengths of the step. `registration` lays the seeds' samples
    over each other before their mean is taken.
    Departures: the update's distance is divided by the update's squared norm, so that one set of weights, ours, serves every model. Samples
    of one label are paired first. Registration knows shifts and mirroring, and the paper's optical flow more. Noise and registration are
    off by default. Among the seeds the lowest objective is returned.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    matches: ClassVar = "whole"
    quick_rank: ClassVar = 2
    quick: ClassVar[dict[str, Any]] = {"steps": 200, "restarts": 2}

    steps: PositiveInt = 4000
    restarts: PositiveInt = 4
    learning_rate: PositiveFloat = 0.1
    gradient: PositiveFloat = 1.0
    total_variation: NonNegativeFloat = 1e-3
    norm: NonNegativeFloat = 1e-5
    batch_norm: NonNegativeFloat = 2e-4
    first_batch_norm: NonNegativeFloat = 10.0
    consistency: NonNegativeFloat = 1e-2
    consistency_onset: Fraction = 0.5
    registration: bool = False
    pixel_noise: NonNegativeFloat = 0.0
    warm_up: Fraction = 0.0025
    boxed: bool = True
    patience: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    path: Path = "auto"
    precision: Precision = "fp32"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        priors: list[Prior] = []
        if self.total_variation:
            priors.append(TotalVariation(weight=self.total_variation))
        if self.norm:
            priors.append(SquaredNorm(weight=self.norm))
        if self.batch_norm:
            leading = (self.first_batch_norm,)
            priors.append(batch_norm_prior(exposure.model, weight=self.batch_norm, leading=leading, buffers=exposure.buffers))
        recipe = Recipe(
            distance=SquaredError(relative=True, weight=self.gradient),
            optimiser=Adam(),
            rate=Rate(start=self.learning_rate, shape="cosine", warm_up=self.warm_up),
            steps=self.steps,
            restarts=self.restarts,
            priors=tuple(priors),
            consistency=self.consistency,
            consistency_onset=self.consistency_onset,
            registered=self.registration,
            pixel_noise=self.pixel_noise,
            boxed=self.boxed,
            patience=self.patience,
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
        )
        return solve(exposure, labels, rng, recipe)
