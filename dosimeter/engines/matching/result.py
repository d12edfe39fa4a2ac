"""What an attack hands back: the restart with the lowest final objective, the mean of several, or nothing and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.matching.consistency import consensus
from dosimeter.engines.matching.paths import Evaluator
from dosimeter.engines.matching.problem import Problem
from dosimeter.engines.matching.state import State
from dosimeter.engines.matching.terms import TermSchedule, evaluate_final
from dosimeter.types import Outcome, Reconstruction


@dataclass(frozen=True)
class Ends:
    """Where each restart ended: the better of its best guess and its last one, by the final objective."""

    variables: Tensor  # (R, D)
    objective: Tensor  # (R,) infinite where it is not finite
    distance: Tensor  # (R,)


def make_reconstruction(problem: Problem, state: State, evaluator: Evaluator, stopped: str) -> Reconstruction:
    """The restart whose end has the lowest objective, or the mean of those within `average_within` of it."""
    ends = _final_ends(problem, state, evaluator)
    chosen = int(ends.objective.argmin())
    if not bool(torch.isfinite(ends.objective[chosen])):
        return give_up(problem, state, Outcome.DIVERGED, stopped or "the objective is not finite at any guess")
    inputs, labels = _samples(problem, ends.variables[chosen])
    objective, distance, averaged = float(ends.objective[chosen]), float(ends.distance[chosen]), ""
    similar = _within(ends.objective, chosen, problem.recipe.average_within)
    if len(similar) > 1 and problem.guess.targets is not None:
        inputs, objective, distance, averaged = _average(problem, ends.variables[similar], objective)
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        objective=objective,
        distance=distance,
        normalization=problem.exposure.public.normalization,
        restarts=(*(float(value) for value in ends.objective), *state.ended),
        message="; ".join(note for note in (stopped, *_notes(problem, state, evaluator), averaged) if note),
        recipe=problem.recipe,
    )


def give_up(problem: Problem, state: State, outcome: Outcome, message: str) -> Reconstruction:
    """No answer: the first restart's best guess, with an infinite objective, and why."""
    inputs, labels = _samples(problem, state.best[0])
    normalization = problem.exposure.public.normalization
    return Reconstruction(inputs=inputs, labels=labels, objective=torch.inf, normalization=normalization, outcome=outcome, message=message)


def best_inputs(problem: Problem, state: State) -> Tensor:
    """The inputs of the best guess so far: (B, *shape)."""
    return _samples(problem, state.best[int(state.best_objective.argmin())])[0]


def _final_ends(problem: Problem, state: State, evaluator: Evaluator) -> Ends:
    names, terms = TermSchedule(problem).final(one_layer_set=evaluator.one_layer_set)
    evaluations = [evaluator(*problem.guess.unpack(guesses), names, terms) for guesses in (state.best, state.variables)]
    objective = torch.stack([evaluation.objective for evaluation in evaluations]).nan_to_num(torch.inf, torch.inf)  # (2, R)
    distance = torch.stack([evaluation.distance for evaluation in evaluations])
    lowest, which = objective.min(0)  # (R,)
    return Ends(
        variables=torch.where(which[:, None] == 0, state.best, state.variables),
        objective=lowest,
        distance=distance.gather(0, which[None])[0],
    )


def _within(objective: Tensor, chosen: int, factor: float) -> list[int]:
    """The chosen restart, then those whose objectives are within `factor` of its own."""
    if factor <= 1:
        return [chosen]
    bound = factor * float(objective[chosen])
    return [chosen, *(r for r in objective.argsort().tolist() if r != chosen and float(objective[r]) <= bound)]


def _average(problem: Problem, variables: Tensor, best: float) -> tuple[Tensor, float, float, str]:
    """The mean of several guesses, sample by sample: inputs (B, *shape), objective, distance, and a note."""
    guess = problem.guess
    several, _ = guess.unpack(variables)
    inputs = consensus(several, guess.targets)[0]
    mean = evaluate_final(problem, inputs[None])
    objective = float(mean.objective[0])
    apart = float((several[0] - inputs).square().mean().sqrt() / (guess.high - guess.low).mean())
    note = (
        f"the mean of {len(several)} guesses that fit alike, {apart:.2g} of the data range from the best of them, "
        f"with an objective of {objective:.2g} where that has {best:.2g}"
    )
    return inputs, objective, float(mean.distance[0]), note


def _notes(problem: Problem, state: State, evaluator: Evaluator) -> tuple[str, ...]:
    lost = int((~state.alive).sum())
    return (
        f"resumed at step {state.resumed_at}" if state.resumed_at else "",
        evaluator.note,
        "replayed in single precision, since squares of gradients leave the range of half" if problem.widened else "",
        f"{len(state.ended)} of {problem.recipe.restarts} restarts ended after their trial" if state.ended else "",
        f"{lost} of {len(state.alive)} restarts left the finite numbers" if lost else "",
    )


def _samples(problem: Problem, variables: Tensor) -> tuple[Tensor, Tensor]:
    """One row (D,) as inputs (B, *shape) and the labels that they were guessed under."""
    inputs, logits = problem.guess.unpack(variables[None])
    if logits is not None:
        return inputs[0].clone(), problem.objective.soft_targets(logits[0])
    assert problem.guess.targets is not None
    return inputs[0].clone(), problem.guess.targets.clone()
