"""The loop under every optimisation attack: guess inputs, replay the client's training, compare, step."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.choice import first_line
from dosimeter.engines.matching.differentiable import reason_against
from dosimeter.engines.matching.paths import Eager
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.run import PULSE, Run, surroundings
from dosimeter.interfaces import Exposure
from dosimeter.types import LabelEstimate, Outcome, Reconstruction

SHORT_OF_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")  # as CPU, CUDA and its libraries say it


def solve(
    exposure: Exposure, labels: LabelEstimate | None, rng: Generator, recipe: Recipe, *, start: Tensor | None = None
) -> Reconstruction:
    """Run `recipe` on an exposure, from `start` (B, *shape) where given. Restarts are chosen by the objective alone.

    Every failure ends in an outcome.
    """
    run = Run(exposure, labels, rng, recipe, start)
    if all(not bool(change.any()) for change in run.objective.target.values()):
        return run.gave_up(Outcome.IMPOSSIBLE, "the update is zero in every layer: it says nothing about the inputs")
    try:
        with surroundings(run):
            reason = reason_against(run.exposure, recipe, run.guess, run.variables)
            if reason:
                return run.gave_up(Outcome.IMPOSSIBLE, reason)
            rounds, left = [], recipe
            while left is not None:
                began, run = time.monotonic(), Run(exposure, labels, rng, left) if rounds else run
                rounds.append(run.carried_out())
                left = _left(run, time.monotonic() - began) if recipe.anew and run.stalled else None
        best = min(rounds, key=lambda found: found.objective)
        told = f"the best of {len(rounds)} rounds, each begun anew where the one before it stalled" if len(rounds) > 1 else ""
        return replace(best, message="; ".join(part for part in (best.message, told) if part))
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        return run.gave_up(*_told(error))


def _told(error: Exception) -> tuple[Outcome, str]:
    """What an error in the middle of an attack says: of the model, of the machine, or of neither."""
    line = first_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in line for words in SHORT_OF_MEMORY):
        return Outcome.CRASHED, f"out of memory; fewer restarts, a smaller batch or smaller images would need less: {line}"
    if any(word in line for word in ("derivative", "differentia", "backward", "grad", "inplace")):
        return Outcome.IMPOSSIBLE, f"the model's gradient cannot be differentiated once more: {line}"
    if "overflow" in line:
        return Outcome.DIVERGED, f"a step left the range of numbers; a smaller learning rate would stay in it: {line}"
    return Outcome.CRASHED, f"stopped by an error of the model or of PyTorch: {line}"


def _left(run: Run, seconds: float) -> Recipe | None:
    """The recipe for the steps and the time that a run has left over, its trial as long as before; None where they do not suffice."""
    recipe = run.recipe
    steps = recipe.steps - max(run.step, recipe.patience or 10 * PULSE)  # one that never had a finite number has had its try
    trial = round((recipe.trial or 0.0) * recipe.steps)
    time_left = None if recipe.seconds is None else recipe.seconds - seconds
    if steps <= trial or (time_left is not None and time_left <= 0):
        return None
    return replace(recipe, steps=steps, trial=trial / steps if trial else None, seconds=time_left)


def start_distance(exposure: Exposure, labels: LabelEstimate | None, rng: Generator, recipe: Recipe) -> float:
    """How far the recipe's first guess is from the client's update, mean over restarts; `rng` is left as it was."""
    own = torch.Generator(rng.device)
    own.set_state(rng.get_state())
    run = Run(exposure, labels, own, recipe)
    names, terms = run.terms(0.0)
    try:
        with surroundings(run):
            distance = Eager(run.objective)(*run.guess.unpack(run.variables), names, terms).distance
    except (RuntimeError, NotImplementedError):  # what cannot be differentiated is found out, and told of, by `solve`
        return 1.0
    return float(distance.nan_to_num(1.0, 1.0, 1.0).mean())
