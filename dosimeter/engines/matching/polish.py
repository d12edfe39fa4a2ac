"""The last digits of a guess: least squares from where another objective ended."""

from __future__ import annotations

from dataclasses import replace

from torch import Generator

from dosimeter.engines.matching.attack import objective_at
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.optimisers import LBFGS
from dosimeter.engines.matching.recipe import Path, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.normalization import input_bounds
from dosimeter.types import LabelEstimate, Outcome, Reconstruction

KEPT_BELOW = 1e-3  # of the squared error before: what polishing must reach to be kept
TOLERANCE = 1e-12  # relative squared error at which float32 updates agree
PATIENCE = 100


def polish(
    found: Reconstruction,
    exposure: Exposure,
    labels: LabelEstimate | None,
    rng: Generator,
    *,
    steps: int,
    seconds: float | None = None,
    path: Path = "auto",
) -> Reconstruction:
    """L-BFGS on the squared error of the update, from a near guess. Returns the guess itself if that does not help.

    Near a solution the error falls by orders of magnitude. Where the error falls by less, the guess lies in another valley, or only noise
    is left to fit. The priors then say more about the inputs than the rest of the error.
    """
    if found.outcome is not Outcome.COMPLETED or not len(found.inputs):
        return found
    recipe = Recipe(
        distance=SquaredError(relative=True),
        optimiser=LBFGS(history=min(100, steps)),
        rate=Rate(start=1.0, shape="constant"),
        steps=steps,
        boxed=False,
        tolerance=TOLERANCE,
        patience=PATIENCE,
        seconds=seconds,
        path=path,
    )
    polished = solve(exposure, labels, rng, recipe, start=found.inputs)
    if polished.recipe is None:
        return found
    before = objective_at(exposure, recipe, found.inputs, found.labels)
    if not polished.objective <= KEPT_BELOW * before:
        return found
    note = f"polished by least squares, to {polished.objective / before:.1g} of the squared error"
    low, high = input_bounds(found.normalization, polished.inputs)
    return replace(
        polished,
        inputs=polished.inputs.clamp(low, high),
        restarts=found.restarts,
        message="; ".join(part for part in (found.message, note) if part),
    )
