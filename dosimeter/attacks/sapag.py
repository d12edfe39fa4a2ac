"""SAPAG: match the update under a Gaussian kernel that adapts to each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Generator

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import GaussianKernel
from dosimeter.engines.matching.optimisers import LBFGS, Adam
from dosimeter.engines.matching.recipe import Path, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction

WEIGHT_DECAY = 0.01  # of AdamW, PyTorch's default; the paper names none


@ATTACKS.register("sapag")
@dataclass(frozen=True, kw_only=True)
class SAPAG(MatchingAttack):
    """Weighs every layer's mismatch by a Gaussian kernel as wide as the layer's own gradient varies.

    Wang et al., "SAPAG: A Self-Adaptive Privacy Attack From Gradients", 2020: the weighted Gaussian kernel as distance, with the variance
    of each layer's update as its width.
    Departures: the squared error is averaged over a layer (see `GaussianKernel`). The variance is multiplied by `width`, since kernels as
    narrow as the paper's are flat at most starts. Labels come from a label recovery, or move as in DLG where none are given. The optimiser
    is Adam from noise, since L-BFGS takes no step where the kernel is flat. `optimiser="adamw", start="constant", width=1` is the published
    attack (thesis Table 2.1).
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset()
    matches: ClassVar = "whole"
    quick: ClassVar[dict[str, Any]] = {"steps": 300}

    steps: PositiveInt = 2000
    restarts: PositiveInt = 1
    learning_rate: PositiveFloat = 0.1
    width: PositiveFloat = 10.0  # multiplies the variance; 1 is the paper's
    optimiser: Literal["adam", "adamw", "lbfgs"] = "adam"
    start: Literal["normal", "uniform", "constant"] = "normal"
    boxed: bool = True
    patience: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    path: Path = "auto"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        recipe = Recipe(
            distance=GaussianKernel(width=self.width),
            optimiser=LBFGS() if self.optimiser == "lbfgs" else Adam(weight_decay=WEIGHT_DECAY if self.optimiser == "adamw" else 0.0),
            rate=Rate(start=self.learning_rate, shape="constant" if self.optimiser == "lbfgs" else "cosine"),
            steps=self.steps,
            restarts=self.restarts,
            boxed=self.boxed,
            start=self.start,
            joint_labels=labels is None,
            patience=self.patience,
            seconds=self.seconds,
            path=self.path,
        )
        return solve(exposure, labels, rng, recipe)
