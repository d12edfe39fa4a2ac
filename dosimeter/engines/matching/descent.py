"""The descent of an attack: its steps, its checkpoints, and when it stops."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.matching.checkpoints import Checkpoint
from dosimeter.engines.matching.choice import choose
from dosimeter.engines.matching.consistency import with_consistency
from dosimeter.engines.matching.paths import Evaluation, Evaluator
from dosimeter.engines.matching.problem import Problem
from dosimeter.engines.matching.result import best_inputs
from dosimeter.engines.matching.state import (
    State,
    end_trial,
    fits,
    forget_best_objective,
    keep_best,
    move,
    restore,
    shake,
    to_tensors,
    trial_ends,
)
from dosimeter.engines.matching.terms import TermSchedule
from dosimeter.progress import advance
from dosimeter.stopping import stop_requested

PULSE = 10  # steps between two looks at the numbers, each of which waits for the device
FALL, FALL_BEFORE_RESTART = 0.999, 0.9  # of the lowest objective: less counts as better; with fresh starts waiting, slow progress does not


@dataclass(frozen=True)
class Stop:
    """Why a descent stopped early, and whether it stalled: fresh starts may do better then."""

    reason: str = ""
    stalled: bool = False


def descend(problem: Problem, state: State, rng: Generator, checkpoint: Checkpoint) -> tuple[Evaluator, Stop | None]:
    """Advance the state until its steps are done or something stops it. Returns the evaluator that was used last, and the stop."""
    recipe, began = problem.recipe, time.monotonic()
    state.memory = recipe.optimiser.start(state.variables)
    saved = checkpoint.load(problem.device)
    if saved is not None and fits(state, rng, saved):
        restore(state, rng, saved)
    evaluator, schedule = choose(problem, state.variables), TermSchedule(problem)
    while state.step < recipe.steps:
        looks = state.step % PULSE == 0
        if checkpoint.due and (looks or stop_requested()):
            checkpoint.save(to_tensors(state, rng), best_inputs(problem, state))
        if problem.begins_phase(state.step):
            forget_best_objective(state)
        evaluation = evaluate(problem, state, evaluator, schedule, rng)
        keep_best(state, recipe, evaluation)
        if looks:
            stop = look(problem, state, evaluation, time.monotonic() - began)
            if stop is not None:
                return evaluator, stop
        move(state, problem, evaluation)
        if recipe.pixel_noise:
            shake(state, problem, rng)
        if trial_ends(state, recipe):
            end_trial(state, recipe)
            evaluator = choose(problem, state.variables)
    advance(recipe.steps, recipe.steps, f"objective {float(state.best_objective.min()):.3g}")
    return evaluator, None


def evaluate(problem: Problem, state: State, evaluator: Evaluator, schedule: TermSchedule, rng: Generator) -> Evaluation:
    """The objective of the current guesses and its gradient, with the pull towards the restarts' consensus where the recipe wants one."""
    recipe, progress = problem.recipe, state.step / problem.recipe.steps
    names, terms = schedule.at(progress, rng, one_layer_set=evaluator.one_layer_set)
    evaluation = evaluator(*problem.guess.unpack(state.variables), names, terms)
    if recipe.consistency > 0 and progress >= recipe.consistency_onset and len(state.variables) > 1:
        return with_consistency(evaluation, problem.guess, state.variables, recipe.consistency, registered=recipe.registered)
    return evaluation


def look(problem: Problem, state: State, evaluation: Evaluation, seconds: float) -> Stop | None:
    """Report progress, note whether the objective fell, and say why the descent should stop, or None."""
    recipe = problem.recipe
    lowest = float(state.best_objective.min())
    advance(state.step, recipe.steps, f"objective {lowest:.3g}")
    if lowest < (FALL_BEFORE_RESTART if recipe.restart_on_stall else FALL) * state.improved_to:
        state.improved_at, state.improved_to = state.step, lowest
    if not bool(state.alive.any()):
        return Stop(f"every start left the finite numbers by step {state.step}", stalled=True)
    if _is_matched(problem, evaluation):
        return Stop(f"matched after {state.step} steps")
    if recipe.patience is not None and state.step - state.improved_at >= recipe.patience:
        return Stop(f"no better for {recipe.patience} steps, stopped after {state.step}", stalled=True)
    if recipe.seconds is not None and seconds >= recipe.seconds:
        return Stop(f"the time budget of {recipe.seconds:g} s ended after {state.step} of {recipe.steps} steps")
    return None


def _is_matched(problem: Problem, evaluation: Evaluation) -> bool:
    recipe = problem.recipe
    if not recipe.tolerance:
        return False
    uninformed = recipe.distance.scale(list(problem.objective.target.values()))
    return float(evaluation.distance.nan_to_num(torch.inf).min()) <= recipe.tolerance * uninformed
