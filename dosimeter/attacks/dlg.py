"""Deep Leakage from Gradients: match the update in the least-squares sense, labels and all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.features import feature_term
from dosimeter.engines.matching.optimisers import LBFGS
from dosimeter.engines.matching.recipe import Path, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction


@ATTACKS.register("dlg")
@dataclass(frozen=True, kw_only=True)
class DLG(MatchingAttack):
    """Moves dummy inputs and dummy labels until their gradient is the client's.

    Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019: Eq. (1), Algorithm 1. L-BFGS with step 1 and no line search, from
    normal noise. Labels are softmaxes of logits. The paper's step is up to 20 of ours.
    Departures: the best of `restarts` starts is returned. Given labels stay fixed (Zhao et al., "iDLG", 2020) unless `joint_labels`.
    The run stops at a relative distance of `found`. If `patience` steps gain less than a tenth, or no start is finite, fresh starts
    follow. `restarts=1, patience=None` is published.
    `features` adds Wang et al., "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024, Eq. (8): β is
    `feature_weight`, α `head_weight`.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset()
    matches: ClassVar = "whole"
    quick_rank: ClassVar = 3
    quick: ClassVar[dict[str, Any]] = {"steps": 300, "restarts": 2}

    steps: PositiveInt = 6000
    restarts: PositiveInt = 4
    learning_rate: PositiveFloat = 1.0
    history: PositiveInt = 100
    trial: Fraction | None = 1 / 15  # after this share of the steps only the best start goes on; none: all do
    joint_labels: bool | None = None  # none: exactly where no labels are given
    features: str | None = None
    feature_weight: PositiveFloat = 2.0
    head_weight: NonNegativeFloat | None = None  # none: 0 where features stand in for the head's gradient, else 1
    found: NonNegativeFloat = 1e-8
    patience: PositiveInt | None = 200
    seconds: PositiveFloat | None = None
    path: Path = "auto"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        distance = SquaredError()
        term = feature_term(self.features, exposure, labels, rng, weight=self.feature_weight, distance=distance)
        recipe = Recipe(
            distance=distance,
            priors=term.priors,
            layer_weights=term.layer_weights(self.head_weight),
            optimiser=LBFGS(history=min(self.history, self.steps)),
            rate=Rate(start=self.learning_rate, shape="constant"),
            steps=self.steps,
            restarts=self.restarts,
            trial=self.trial,
            boxed=False,
            joint_labels=labels is None if self.joint_labels is None else self.joint_labels,
            tolerance=self.found,
            patience=self.patience,
            restart_on_stall=self.patience is not None,
            seconds=self.seconds,
            path=self.path,
        )
        return term.with_note(solve(exposure, labels, rng, recipe))
