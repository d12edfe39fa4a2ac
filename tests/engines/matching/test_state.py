"""The state of a descent: what a step keeps, moves, ends and saves."""

import pytest
import torch
from torch import Generator

from dosimeter.engines.matching.optimisers import LBFGS
from dosimeter.engines.matching.paths import Evaluation
from dosimeter.engines.matching.state import (
    begin,
    end_trial,
    forget_best_objective,
    keep_best,
    move,
    restore,
    shake,
    to_tensors,
    trial_ends,
)


def evaluation(problem, *objectives: float) -> Evaluation:
    values = torch.tensor(objectives).double()
    return Evaluation(values, values, torch.ones(len(values), *problem.guess.shape).double(), None)


def started(problem):
    state = begin(problem, Generator().manual_seed(0))
    state.memory = problem.recipe.optimiser.start(state.variables)
    return state


def test_a_start_is_drawn_into_the_box_or_given(make) -> None:
    problem = make(restarts=3)
    drawn = begin(problem, Generator().manual_seed(0))
    assert drawn.variables.shape == (3, 72)
    assert (float(drawn.variables.min()), float(drawn.variables.max())) == (0.0, 1.0)
    given = begin(problem, Generator().manual_seed(0), start=torch.full((2, 1, 6, 6), 0.25))
    assert bool((given.variables == 0.25).all())


def test_each_restart_keeps_its_best_guess_until_the_objective_changes_its_parts(make) -> None:
    problem = make(restarts=2)
    state = started(problem)
    first = state.variables.clone()
    keep_best(state, problem.recipe, evaluation(problem, 1.0, 2.0))
    state.variables = state.variables + 1
    keep_best(state, problem.recipe, evaluation(problem, 3.0, 1.5))
    assert state.best_objective.tolist() == [1.0, 1.5]
    assert torch.equal(state.best, torch.stack([first[0], first[1] + 1]))
    forget_best_objective(state)
    keep_best(state, problem.recipe, evaluation(problem, 9.0, 9.0))
    assert torch.equal(state.best, state.variables)


def test_a_restart_that_leaves_the_finite_numbers_stays_at_its_best(make) -> None:
    problem = make(restarts=2)
    state = started(problem)
    keep_best(state, problem.recipe, evaluation(problem, 1.0, 1.0))
    best = state.best.clone()
    keep_best(state, problem.recipe, evaluation(problem, torch.nan, 1.0))
    assert state.alive.tolist() == [False, True]
    move(state, problem, evaluation(problem, torch.nan, 1.0))
    assert torch.equal(state.variables[0], best[0])
    assert not torch.equal(state.variables[1], best[1])
    assert state.step == 1


def test_pixel_noise_is_as_long_as_asked_in_steps_and_spares_what_has_ended(make) -> None:
    problem = make(restarts=2, pixel_noise=0.2, boxed=False)
    state = started(problem)
    state.alive[0] = False
    before = state.variables.clone()
    shake(state, problem, Generator().manual_seed(1))
    assert torch.equal(state.variables[0], before[0])
    moved = (state.variables - before)[1]
    assert float(moved.std()) == pytest.approx(0.2 * problem.recipe.rate.at(0.0), rel=0.2)


def test_dropout_keeps_the_newest_guess_since_objectives_do_not_compare(make) -> None:
    problem = make(dropout=0.5)
    state = started(problem)
    keep_best(state, problem.recipe, evaluation(problem, 1.0))
    state.variables = state.variables + 1
    keep_best(state, problem.recipe, evaluation(problem, 5.0))
    assert torch.equal(state.best, state.variables)


def test_the_trial_leaves_the_survivors_with_the_lowest_objectives(make) -> None:
    problem = make(restarts=4, trial=0.5, survivors=2)
    state = started(problem)
    keep_best(state, problem.recipe, evaluation(problem, 4.0, 1.0, 3.0, 2.0))
    state.memory["mean"] = torch.arange(4.0)[:, None].expand(4, 72).clone()
    assert not trial_ends(state, problem.recipe)
    state.step = 30
    assert trial_ends(state, problem.recipe)
    end_trial(state, problem.recipe)
    assert state.best_objective.tolist() == [1.0, 2.0]
    assert state.ended == (3.0, 4.0)
    assert state.memory["mean"][:, 0].tolist() == [1.0, 3.0]
    assert not trial_ends(state, problem.recipe)


def test_a_saved_state_is_restored_bit_for_bit_with_its_random_numbers(make) -> None:
    problem, rng = make(restarts=2, optimiser=LBFGS(history=3)), Generator().manual_seed(1)
    state = started(problem)
    keep_best(state, problem.recipe, evaluation(problem, 1.0, 2.0))
    move(state, problem, evaluation(problem, 1.0, 2.0))
    state.ended, state.improved_at, state.improved_to = (7.0,), 1, 1.0
    saved = {name: tensor.clone() for name, tensor in to_tensors(state, rng).items()}
    drawn = torch.rand(3, generator=rng)
    other, again = started(problem), Generator().manual_seed(9)
    with torch.random.fork_rng():
        restore(other, again, saved)
    assert torch.equal(torch.rand(3, generator=again), drawn)
    assert all(torch.equal(getattr(other, name), getattr(state, name)) for name in ("variables", "best", "best_objective", "alive"))
    assert all(torch.equal(other.memory[name], tensor) for name, tensor in state.memory.items())
    assert (other.step, other.resumed_at, other.ended, other.improved_at, other.improved_to) == (1, 1, (7.0,), 1, 1.0)
