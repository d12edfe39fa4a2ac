"""Inverting Gradients: match the update's direction under a total-variation prior."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Generator

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.features import feature_term
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.polish import polish
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve_problem, start_distance
from dosimeter.interfaces import Exposure
from dosimeter.options import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction

VARIATION_WEIGHT, VARIATION_SHARE = 0.01, 0.1  # of total variation, and its largest share of the distance at the start
MATCHING_TIME = 2 / 3  # of the seconds, where polishing is to follow
PLAIN_STEPS_FROM = 4000  # steps from which on plain steps end lower than signed ones


@ATTACKS.register("inverting_gradients")
@dataclass(frozen=True, kw_only=True)
class InvertingGradients(MatchingAttack):
    """Finds inputs in the data range whose gradient points where the client's does, and whose neighbouring pixels agree.

    Geiping et al., "Inverting Gradients: How easy is it to break privacy in federated learning?", NeurIPS 2020: Eq. (4), cosine
    distance plus total variation. Adam's step of .1 is cut to a tenth at 3/8, 5/8 and 7/8 of the steps. Signed steps improve faster at
    first; plain steps end lower.
    Departures: total variation weighs at most a tenth of the distance at the start. Restarts are compared by their objective. `polish`
    is ours.
    `features` adds Wang et al., "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024, Eq. (8): β is
    `feature_weight`, α `head_weight`; "labels" takes the label recovery's.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    matches: ClassVar = "direction"
    quick_rank: ClassVar = 1
    quick: ClassVar[dict[str, Any]] = {"steps": 400}

    steps: PositiveInt = 4800
    restarts: PositiveInt = 1
    learning_rate: PositiveFloat = 0.1
    total_variation: NonNegativeFloat | None = None  # none: .01, at most .1 of the distance at the start
    total_variation_form: Literal["l1", "isotropic"] = "l1"
    sign: Literal["raw", "signed", "soft"] | None = None  # none: signed, and raw from 4,000 steps on
    features: str | None = None
    feature_weight: PositiveFloat = 2.0
    head_weight: NonNegativeFloat | None = None  # none: 0 where features stand in for the head's gradient, else 1
    feature_start: Fraction = 0.0
    boxed: bool = True
    start: Literal["normal", "uniform", "grey"] = "normal"
    moving_labels: Literal["no", "from_labels", "from_noise"] = "no"  # labels that move with the inputs, and where they begin
    patience: PositiveInt | None = None
    polish: NonNegativeInt = 0  # steps of L-BFGS on the squared error afterwards, kept where they end near 0
    seconds: PositiveFloat | None = None
    path: Path = "auto"
    precision: Precision = "fp32"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        distance = Cosine()
        term = feature_term(self.features, exposure, labels, rng, weight=self.feature_weight, distance=distance)
        recipe = Recipe(
            distance=distance,
            optimiser=Adam(sign=self.sign or ("raw" if self.steps >= PLAIN_STEPS_FROM else "signed")),
            rate=Rate(start=self.learning_rate),
            steps=self.steps,
            restarts=self.restarts,
            priors=term.priors,
            layer_weights=term.layer_weights(self.head_weight),
            matching_onset=self.feature_start if term.priors else 0.0,
            boxed=self.boxed,
            start=self.start,
            joint_labels=self.moving_labels != "no",
            patience=self.patience,
            seconds=self.seconds if self.seconds is None or not self.polish else MATCHING_TIME * self.seconds,
            path=self.path,
            precision=self.precision,
        )
        told = None if self.moving_labels == "from_noise" else labels
        problem, weight = make_problem(exposure, told, recipe), self.total_variation
        if weight is None:
            weight = min(VARIATION_WEIGHT, VARIATION_SHARE * start_distance(problem, rng))
        if weight:
            variation = TotalVariation(weight=weight, form=self.total_variation_form)
            problem = problem.under(replace(recipe, priors=(variation, *term.priors)))
        began = time.monotonic()
        found = solve_problem(problem, rng)
        left = None if self.seconds is None else self.seconds - (time.monotonic() - began)
        if self.polish and (left is None or left > 0):
            found = polish(found, exposure, labels, rng, steps=self.polish, seconds=left, path=self.path)
        return term.with_note(found)
