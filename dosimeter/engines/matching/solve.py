"""The loop under every optimisation attack: guess inputs, replay the client's training, compare, step."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.checkpoints import Checkpoint
from dosimeter.engines.matching.descent import PULSE, descend
from dosimeter.engines.matching.differentiable import reason_against
from dosimeter.engines.matching.errors import outcome_of_error
from dosimeter.engines.matching.memory_needs import memory_lacking
from dosimeter.engines.matching.paths import Eager
from dosimeter.engines.matching.problem import Problem, make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.result import give_up, make_reconstruction
from dosimeter.engines.matching.state import State, begin
from dosimeter.engines.matching.surroundings import surroundings
from dosimeter.engines.matching.terms import TermSchedule
from dosimeter.engines.needs import refusal_of_zero
from dosimeter.interfaces import Exposure
from dosimeter.types import Impossible, LabelEstimate, Outcome, Reconstruction


def solve(
    exposure: Exposure, labels: LabelEstimate | None, rng: Generator, recipe: Recipe, *, start: Tensor | None = None
) -> Reconstruction:
    """Run `recipe` on an exposure, from `start` (B, *shape) where given."""
    return solve_problem(make_problem(exposure, labels, recipe), rng, start=start)


def solve_problem(problem: Problem, rng: Generator, *, start: Tensor | None = None) -> Reconstruction:
    """Carry out a problem's recipe. Restarts are chosen by the objective alone. Every failure ends in an outcome."""
    state = begin(problem, rng, start)
    if problem.update_is_zero:
        return _nothing_to_match(problem, state)
    rounds: list[Reconstruction] = []
    try:
        with surroundings(problem, rng):
            reason = memory_lacking(problem) or reason_against(problem, state.variables)
            if reason:
                return give_up(problem, state, Outcome.NOT_ATTEMPTED, reason)
            while True:
                found, left = _carry_out(problem, state, rng)
                rounds.append(found)
                if left is None:
                    return _best_round(rounds)
                problem = replace(problem, recipe=left)
                state = begin(problem, rng)
    except (RuntimeError, NotImplementedError, MemoryError, OverflowError) as error:
        return give_up(problem, state, *outcome_of_error(error))


def _nothing_to_match(problem: Problem, state: State) -> Reconstruction:
    """What is zero in every layer that is matched: impossible only where a theorem says so."""
    match refusal_of_zero(problem.exposure):
        case Impossible() as proof:
            return replace(give_up(problem, state, Outcome.IMPOSSIBLE, proof.reason), theorem=proof.theorem)
        case None:
            return give_up(problem, state, Outcome.NOT_ATTEMPTED, "the update is zero in every layer that the attack matches")
        case refusal:
            return give_up(problem, state, Outcome.NOT_ATTEMPTED, str(refusal))


def _carry_out(problem: Problem, state: State, rng: Generator) -> tuple[Reconstruction, Recipe | None]:
    """One descent to its end: what it found, and the recipe for another round where it stalled with steps left."""
    began = time.monotonic()
    checkpoint = Checkpoint(problem.exposure, problem.recipe, state.variables, problem.guess.targets)
    with checkpoint.saving_before_stop():
        evaluator, stop = descend(problem, state, rng, checkpoint)
    found = make_reconstruction(problem, state, evaluator, stop.reason if stop else "")
    checkpoint.remove()
    stalled = stop is not None and stop.stalled
    left = _recipe_left(problem.recipe, state.step, time.monotonic() - began) if problem.recipe.restart_on_stall and stalled else None
    return found, left


def _recipe_left(recipe: Recipe, steps_done: int, seconds: float) -> Recipe | None:
    """The recipe for the steps and the time that are left, with a trial as long as before; None where they do not suffice."""
    steps = recipe.steps - max(steps_done, recipe.patience or 10 * PULSE)  # a round that ends at once counts as a whole one
    trial = round((recipe.trial or 0.0) * recipe.steps)
    time_left = None if recipe.seconds is None else recipe.seconds - seconds
    if steps <= trial or (time_left is not None and time_left <= 0):
        return None
    return replace(recipe, steps=steps, trial=trial / steps if trial else None, seconds=time_left)


def _best_round(rounds: list[Reconstruction]) -> Reconstruction:
    best = min(rounds, key=lambda found: found.objective)
    note = f"the best of {len(rounds)} rounds, each begun anew where the one before it stalled" if len(rounds) > 1 else ""
    return replace(best, message="; ".join(part for part in (best.message, note) if part))


def start_distance(problem: Problem, rng: Generator) -> float:
    """How far the recipe's first guess is from the client's update, mean over restarts; `rng` is left as it was."""
    own = torch.Generator(rng.device)
    own.set_state(rng.get_state())
    state = begin(problem, own)
    names, terms = TermSchedule(problem).at(0.0, own)
    try:
        with surroundings(problem, own):
            distance = Eager(problem.objective)(*problem.guess.unpack(state.variables), names, terms).distance
    except (RuntimeError, NotImplementedError):  # `solve` finds out, and says, what cannot be differentiated
        return 1.0
    return float(distance.nan_to_num(1.0, 1.0, 1.0).mean())
