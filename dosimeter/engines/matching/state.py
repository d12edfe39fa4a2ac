"""What changes while an attack runs: the guesses, the best of each, and the optimiser's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.guess import draw_start
from dosimeter.engines.matching.optimisers import Memory
from dosimeter.engines.matching.paths import Evaluation
from dosimeter.engines.matching.problem import Problem
from dosimeter.engines.matching.recipe import Recipe

PER_RESTART = ("variables", "best", "best objective", "alive")  # saved tensors with one row a restart


@dataclass(kw_only=True)
class State:
    """R restarts side by side, each with the best guess that it has met."""

    variables: Tensor  # (R, D)
    best: Tensor  # (R, D)
    best_objective: Tensor  # (R,) since the objective last changed its parts
    alive: Tensor  # (R,) False where a restart left the finite numbers
    memory: Memory = field(default_factory=dict)  # the optimiser's
    ended: tuple[float, ...] = ()  # the objectives of the restarts that the trial ended
    step: int = 0
    resumed_at: int = 0  # the step at which a killed run of the same attack was taken up
    improved_at: int = 0  # the step at which the lowest objective last fell clearly
    improved_to: float = torch.inf  # and what it fell to


def begin(problem: Problem, rng: Generator, start: Tensor | None = None) -> State:
    """Fresh starts, or `start` (B, *shape) in every restart."""
    recipe, guess = problem.recipe, problem.guess
    variables = draw_start(guess, problem.labels, recipe, rng)  # (R, D)
    if start is not None:
        variables[:, : start.numel()] = start.detach().flatten().to(variables)
    if recipe.boxed:
        variables = guess.clamp_to_range(variables)
    return State(
        variables=variables,
        best=variables.clone(),
        best_objective=variables.new_full((recipe.restarts,), torch.inf),
        alive=torch.ones(recipe.restarts, dtype=torch.bool, device=problem.device),
    )


def forget_best_objective(state: State) -> None:
    """Forget the best values: the objective now has other parts, and earlier values cannot be compared."""
    state.best_objective.fill_(torch.inf)
    state.improved_at, state.improved_to = state.step, torch.inf


def keep_best(state: State, recipe: Recipe, evaluation: Evaluation) -> None:
    """Keep each restart's best guess; a restart that leaves the finite numbers ends at its best. Dropout keeps the newest instead."""
    objective = evaluation.objective
    state.alive &= torch.isfinite(objective)
    better = state.alive if recipe.dropout > 0 else (objective < state.best_objective) & state.alive
    state.best = torch.where(better[:, None], state.variables, state.best)
    state.best_objective = torch.where(better, objective, state.best_objective)


def move(state: State, problem: Problem, evaluation: Evaluation) -> None:
    """One step of the optimiser, for the restarts that are alive."""
    recipe, alive = problem.recipe, state.alive[:, None]
    gradient = problem.guess.pack(evaluation.inputs, evaluation.logits)
    gradient = torch.where(alive, gradient, torch.zeros_like(gradient)).nan_to_num(0.0, 0.0, 0.0)
    moved = recipe.optimiser.step(state.memory, state.variables, gradient, recipe.rate.at(state.step / recipe.steps))
    if recipe.boxed:
        moved = problem.guess.clamp_to_range(moved)
    state.variables = torch.where(alive, moved, state.best)
    state.step += 1


def shake(state: State, problem: Problem, rng: Generator) -> None:
    """Noise on the inputs, λ(t) α_n η with η ~ N(0, 1) (Yin et al., CVPR 2021, Section 3.4)."""
    recipe, size = problem.recipe, math.prod(problem.guess.shape)
    restarts = len(state.variables)
    noise = torch.randn(restarts, size, generator=rng, device=rng.device).to(state.variables)
    moved = state.variables.clone()
    moved[:, :size] += recipe.rate.at(state.step / recipe.steps) * recipe.pixel_noise * noise
    if recipe.boxed:
        moved = problem.guess.clamp_to_range(moved)
    state.variables = torch.where(state.alive[:, None], moved, state.variables)


def trial_ends(state: State, recipe: Recipe) -> bool:
    """Whether the trial ends at this step, with restarts to end."""
    ends = recipe.trial is not None and state.step == max(1, round(recipe.trial * recipe.steps))
    return ends and len(state.variables) > recipe.survivors


def end_trial(state: State, recipe: Recipe) -> None:
    """End every restart but the survivors, whose objectives are lowest."""
    order = state.best_objective.argsort()
    survivors, others = order[: recipe.survivors], order[recipe.survivors :]
    state.ended = tuple(state.best_objective[others].tolist())
    state.variables, state.best, state.best_objective, state.alive = (
        tensor[survivors] for tensor in (state.variables, state.best, state.best_objective, state.alive)
    )
    state.memory = {name: tensor[survivors] if tensor.ndim else tensor for name, tensor in state.memory.items()}


def to_tensors(state: State, rng: Generator) -> dict[str, Tensor]:
    """All of the state, and of the random numbers, by name."""
    tensors = {
        "variables": state.variables,
        "best": state.best,
        "best objective": state.best_objective,
        "alive": state.alive,
        "ended": torch.tensor(state.ended, dtype=torch.float64),
        "steps": torch.tensor([state.step, state.improved_at]),
        "improved to": torch.tensor(state.improved_to, dtype=torch.float64),
        "own numbers": rng.get_state(),
        "global numbers": torch.get_rng_state(),
    }
    if state.variables.is_cuda:
        tensors["device numbers"] = torch.cuda.get_rng_state(state.variables.device)
    return tensors | {f"optimiser {name}": tensor for name, tensor in state.memory.items()}


def fits(state: State, rng: Generator, tensors: dict[str, Tensor]) -> bool:
    """Whether saved tensors can be the state of a run like this one, further on and with as many restarts or fewer."""
    restarts = set()
    for name, own in to_tensors(state, rng).items():
        saved = tensors.get(name)
        if saved is None or saved.dtype != own.dtype or saved.ndim != own.ndim or saved.shape[1:] != own.shape[1:]:
            return False
        if name in PER_RESTART or (name.startswith("optimiser ") and own.ndim):
            restarts.add(len(saved))
        elif saved.shape != own.shape and name != "ended":
            return False
        if name.endswith(" numbers") and not _is_stream(saved):
            return False
    counted = torch.cat([tensors["steps"].flatten(), tensors["optimiser count"].flatten()])
    return len(restarts) == 1 and restarts.pop() > 0 and bool((counted >= 0).all())


def _is_stream(saved: Tensor) -> bool:
    """Whether bytes are the state of a stream of random numbers on a CPU, or of another device's."""
    if saved.numel() != torch.default_generator.get_state().numel():
        return True
    try:
        Generator().set_state(saved.cpu())
    except (RuntimeError, TypeError):
        return False
    return True


def restore(state: State, rng: Generator, tensors: dict[str, Tensor]) -> None:
    """Continue from what `to_tensors` saved, bit for bit."""
    device = state.variables.device
    state.variables, state.best, state.best_objective, state.alive = (
        tensors[name] for name in ("variables", "best", "best objective", "alive")
    )
    state.ended, state.improved_to = tuple(tensors["ended"].tolist()), float(tensors["improved to"])
    state.step, state.improved_at = tensors["steps"].tolist()
    state.resumed_at = state.step
    state.memory = {name: tensors[f"optimiser {name}"] for name in state.memory}
    state.memory["count"] = state.memory["count"].cpu()
    rng.set_state(tensors["own numbers"].cpu())
    torch.set_rng_state(tensors["global numbers"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["device numbers"].cpu(), device)
