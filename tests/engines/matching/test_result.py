"""What an attack hands back: the lowest end, the mean of several, or no answer and why."""

import pytest
import torch
from torch import Generator

import dosimeter as dm
from dosimeter.engines.matching.paths import Eager
from dosimeter.engines.matching.result import best_inputs, give_up, make_reconstruction
from dosimeter.engines.matching.state import begin
from dosimeter.engines.matching.terms import evaluate_final


def test_each_restart_ends_at_the_better_of_its_best_and_its_last_guess(make) -> None:
    problem = make(restarts=2)
    state = begin(problem, Generator().manual_seed(0))
    state.best = state.variables.flip(0)  # the first restart's best is the second's last, and the other way round
    objectives = evaluate_final(problem, problem.guess.unpack(state.variables)[0]).objective
    found = make_reconstruction(problem, state, Eager(problem.objective), "stopped early")
    assert found.restarts == pytest.approx([float(objectives.min())] * 2, rel=1e-12)
    assert found.objective == min(found.restarts)
    assert torch.equal(found.inputs.flatten(), state.variables[int(objectives.argmin())])
    assert found.recipe is problem.recipe
    assert found.message == "stopped early"


def test_guesses_within_the_factor_are_averaged_and_the_objective_is_the_means(make) -> None:
    problem = make(restarts=2, average_within=100.0)
    state = begin(problem, Generator().manual_seed(0))
    found = make_reconstruction(problem, state, Eager(problem.objective), "")
    assert torch.allclose(found.inputs.flatten(), state.variables.mean(0))
    assert found.objective == pytest.approx(float(evaluate_final(problem, found.inputs[None]).objective), rel=1e-12)
    assert "the mean of 2 guesses" in found.message


def test_an_objective_that_is_nowhere_finite_is_a_divergence(make) -> None:
    problem = make()
    state = begin(problem, Generator().manual_seed(0))
    state.variables = state.best = torch.full_like(state.variables, torch.nan)
    found = make_reconstruction(problem, state, Eager(problem.objective), "")
    assert (found.outcome, found.objective, found.recipe) == (dm.Outcome.DIVERGED, torch.inf, None)


def test_giving_up_hands_back_the_first_restarts_best_guess_and_the_reason(make) -> None:
    problem = make(restarts=2)
    state = begin(problem, Generator().manual_seed(0))
    found = give_up(problem, state, dm.Outcome.IMPOSSIBLE, "no reason")
    assert torch.equal(found.inputs.flatten(), state.best[0])
    assert (found.outcome, found.message, found.labels.tolist()) == (dm.Outcome.IMPOSSIBLE, "no reason", [1, 4])


def test_the_best_inputs_are_those_of_the_lowest_objective(make) -> None:
    problem = make(restarts=2)
    state = begin(problem, Generator().manual_seed(0))
    state.best_objective = torch.tensor([2.0, 1.0])
    assert torch.equal(best_inputs(problem, state).flatten(), state.best[1])
