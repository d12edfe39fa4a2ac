"""GradFilt: a filter in the last layer lets through the gradients of chosen classes alone; their samples are found by matching."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Generator, Tensor, nn

from dosimeter.attacks.inverting_gradients import InvertingGradients
from dosimeter.engines.bins.inserted_layer import InsertedLayer
from dosimeter.engines.head_filter import FilteringAttack
from dosimeter.engines.matching.attack import objective_at
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Layers, Rate
from dosimeter.engines.matching.solve import solve_problem, start_distance
from dosimeter.interfaces import Exposure
from dosimeter.network.bottleneck import narrowest
from dosimeter.network.head import find_head
from dosimeter.options import NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import LabelEstimate, Reconstruction, Refused

MATCHED_SAMPLES = 8  # β of Eq. (5.24): beyond as many target samples matching shows little
LEARNING_RATE = 0.1
FADING = (0.3, 1e-3)  # total variation's weight at the start and at the end, as shares of the start's distance
RESTARTS, TRIAL, SURVIVORS = 8, 0.375, 4  # where samples share a mean feature; after this share of the steps the survivors go on
AVERAGE_WITHIN = 1.1  # guesses whose objectives are within this factor of the lowest are averaged


@ATTACKS.register("gradfilt")
@dataclass(frozen=True, kw_only=True)
class GradFilt(FilteringAttack):
    """Lets only the target classes' samples through the last layer, and reconstructs those, however large the batch.

    Zhang, Guo and Li, "GradFilt: Class-wise Targeted Data Reconstruction from Gradients in Federated Learning", WWW 2024; thesis
    chapter 5: separation (Eqs. 5.9-5.12), label restoration (Eq. 5.14), calibration (Eqs. 5.16-5.22), matching under the cosine
    distance (Eq. 5.23). See also `gradfilt_imprint`.
    Departures: the calibration's signs and multi-target rows are corrected (see `calibrate`). The thesis leaves Ω and α open (here
    1,000 and 1). If no layer is narrower than an input, each target class's mean feature is matched, else the update, with least
    squares at the end. `matched="update"` is Eq. (5.23) plus total variation. Batch norm in train mode and local steps make the
    separation inexact.
    """

    steps: PositiveInt = 4800
    restarts: PositiveInt | None = None  # none: eight where samples share a mean feature, of which a trial leaves four, else one
    total_variation: NonNegativeFloat | None = None  # none: it fades where features are matched, else as inverting_gradients chooses it
    matched: Literal["features", "update"] | None = None  # none: features where no layer is narrower than an input, else polished
    seconds: PositiveFloat | None = None
    path: Path = "auto"
    precision: Precision = "fp32"

    def tamper(self, model: nn.Module) -> nn.Module:
        return self.plant(model)

    def recover(self, exposure: Exposure, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> tuple[Reconstruction, str]:
        if isinstance(exposure.model, InsertedLayer):
            raise Refused("the model bears gradfilt_imprint's layer: reconstruct with that attack, or send gradfilt's own tamper(model)")
        match = self._match_features if self._matches_features(exposure) else self._match_update
        note, count = "", len(labels.labels)
        if count > MATCHED_SAMPLES:
            note = f", more than {MATCHED_SAMPLES}: gradfilt_imprint with expected={count} reads them off an inserted layer"
        return match(calibrated, labels, rng), note

    def objective(self, exposure: Exposure, found: Reconstruction, inputs: Tensor, targets: Tensor) -> float | None:
        if not isinstance(found.recipe, Recipe):
            return None
        return objective_at(self.calibrate(exposure)[0], found.recipe, inputs, targets)

    def _matches_features(self, exposure: Exposure) -> bool:
        if self.matched is not None:
            return self.matched == "features"
        shape = exposure.public.input_shape
        return narrowest(exposure.model, find_head(exposure).name, shape) >= math.prod(shape)

    def _match_update(self, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> Reconstruction:
        """Eq. (5.23), with inverting_gradients' total variation, then least squares unless the published form is asked for."""
        matching = InvertingGradients(
            steps=self.steps,
            restarts=self.restarts or 1,
            learning_rate=LEARNING_RATE,
            total_variation=self.total_variation,
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
            polish=0 if self.matched == "update" else self.steps // 2,
        )
        return matching(calibrated, labels, rng)

    def _match_features(self, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> Reconstruction:
        """Inputs whose mean feature in each target class is the client's, while total variation fades.

        The mean feature is smooth in the inputs. The gradient below the head is not: it jumps where a neuron turns on or off. Inputs that
        swap a part with each other have nearly the same mean feature. From plain noise, each part of the images would settle on an order
        of its own. So each sample starts as noise around a colour of its own; in every second start the colour changes across the image.
        Guesses whose objectives end within `AVERAGE_WITHIN` fit equally well. Their mean is returned, which is nearer to the truth than
        most of them.
        """
        head = find_head(calibrated)
        weight = f"{head.name}.weight" if head.name else "weight"
        recipe = Recipe(
            distance=SquaredError(relative=True),
            optimiser=Adam(sign="signed"),
            rate=Rate(start=LEARNING_RATE, shape="cosine"),
            steps=self.steps,
            restarts=self.restarts or (RESTARTS if int(labels.counts.max()) > 1 else 1),
            trial=TRIAL,
            survivors=SURVIVORS,
            average_within=AVERAGE_WITHIN,
            start="coloured",
            layers=Layers(skipped=frozenset(calibrated.update) - {weight}),
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
        )
        problem = make_problem(calibrated, labels, recipe)
        if self.total_variation is None:
            beginning = start_distance(problem, rng)
            first, last = (share * beginning for share in FADING)
        else:
            first = last = self.total_variation
        return solve_problem(problem.under(replace(recipe, priors=(FadingVariation(weight=first, last=last),))), rng)


@dataclass(frozen=True, kw_only=True)
class FadingVariation(TotalVariation):
    """Total variation whose weight falls from `weight` to `last`, by the same factor in each of `stairs` stairs."""

    last: float
    stairs: int = 40

    def weight_at(self, progress: float) -> float:
        stair = min(int(progress * self.stairs), self.stairs - 1)
        return self.weight * (self.last / self.weight) ** (stair / (self.stairs - 1)) if self.weight else 0.0
