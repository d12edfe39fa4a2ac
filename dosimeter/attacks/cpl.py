"""CPL: match the update from a start that repeats one patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Generator

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.optimisers import LBFGS
from dosimeter.engines.matching.recipe import Path, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction


@ATTACKS.register("cpl")
@dataclass(frozen=True, kw_only=True)
class CPL(MatchingAttack):
    """Matches the client's gradient from a random patch that is repeated over the picture.

    Wei et al., "A Framework for Evaluating Gradient Leakage Attacks in Federated Learning", ESORICS 2020, as in thesis Table 2.1: the
    squared distance, L-BFGS and the geometric initialisation. The patch is a quarter of each side, so that a start has structure on a
    coarse scale, where noise has none. Labels are given or recovered.
    Departure: the term α ‖f(x) − y‖², which asks the model to predict the label, is left out; the labels are held fixed in its place.
    `start="normal"` is DLG's.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    matches: ClassVar = "whole"
    quick: ClassVar[dict[str, Any]] = {"steps": 300}

    steps: PositiveInt = 3000
    restarts: PositiveInt = 1
    learning_rate: PositiveFloat = 1.0
    history: PositiveInt = 100
    start: Literal["tiled", "normal", "uniform", "constant"] = "tiled"
    patience: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    path: Path = "auto"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        recipe = Recipe(
            distance=SquaredError(),
            optimiser=LBFGS(history=min(self.history, self.steps)),
            rate=Rate(start=self.learning_rate, shape="constant"),
            steps=self.steps,
            restarts=self.restarts,
            boxed=False,
            start=self.start,
            patience=self.patience,
            seconds=self.seconds,
            path=self.path,
        )
        return solve(exposure, labels, rng, recipe)
