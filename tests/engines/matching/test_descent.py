"""The descent: when it stops and why, and what a look at the numbers notes."""

import pytest
import torch
from torch import Generator

from dosimeter.engines.matching.checkpoints import Checkpoint
from dosimeter.engines.matching.descent import Stop, descend, look
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.paths import Evaluation
from dosimeter.engines.matching.state import begin
from dosimeter.engines.matching.terms import evaluate_final


def carried_out(problem):
    state = begin(problem, rng := Generator().manual_seed(0))
    checkpoint = Checkpoint(problem.exposure, problem.recipe, state.variables, problem.guess.targets)
    return state, *descend(problem, state, rng, checkpoint)


def test_all_steps_are_done_and_the_objective_falls(make) -> None:
    problem = make(steps=40)
    first = evaluate_final(problem, problem.guess.unpack(begin(problem, Generator().manual_seed(0)).variables)[0])
    state, evaluator, stop = carried_out(problem)
    assert (state.step, stop, evaluator.name) == (40, None, "eager")
    assert float(state.best_objective) < 0.7 * float(first.objective)


def test_a_trial_ends_in_the_middle_and_the_survivors_go_on(make) -> None:
    state, evaluator, _ = carried_out(make(steps=20, restarts=3, trial=0.5, survivors=1))
    assert len(state.variables) == 1
    assert len(state.ended) == 2
    assert evaluator.name == "eager"


def looked_at(problem, objective: float, *, distance: float = 1.0, seconds: float = 0.0, step: int = 30, **changes) -> tuple:
    state = begin(problem, Generator().manual_seed(0))
    state.step, state.best_objective = step, torch.tensor([objective])
    for name, value in changes.items():
        setattr(state, name, value)
    evaluation = Evaluation(torch.tensor([objective]), torch.tensor([distance]), torch.zeros(0), None)
    return state, look(problem, state, evaluation, seconds)


@pytest.mark.parametrize(("restart_on_stall", "improved"), [(False, True), (True, False)])
def test_slow_progress_counts_unless_fresh_starts_wait(make, restart_on_stall, improved) -> None:
    state, stop = looked_at(make(restart_on_stall=restart_on_stall), 0.95, improved_to=1.0)
    assert stop is None
    assert (state.improved_at, state.improved_to) == ((30, pytest.approx(0.95)) if improved else (0, 1.0))


def test_a_descent_stops_when_matched_when_stalled_when_lost_and_when_late(make) -> None:
    assert looked_at(make(tolerance=1e-3), 1.0, distance=5e-4)[1] == Stop("matched after 30 steps")
    assert looked_at(make(tolerance=1e-3), 1.0, distance=5e-3)[1] is None
    stalled = looked_at(make(patience=20), 1.0, improved_to=1.0, improved_at=10)[1]
    assert stalled.stalled
    assert "no better for 20 steps" in stalled.reason
    lost = looked_at(make(), 1.0, alive=torch.tensor([False]))[1]
    assert lost.stalled
    assert "finite" in lost.reason
    late = looked_at(make(seconds=1.0), 1.0, seconds=2.0)[1]
    assert not late.stalled
    assert "time budget" in late.reason


def test_the_tolerance_is_relative_to_a_guess_that_says_nothing(make) -> None:
    problem = make(tolerance=1e-3, distance=SquaredError())
    size = sum(float(change.square().sum()) for change in problem.exposure.update.values())
    assert looked_at(problem, 1.0, distance=0.9e-3 * size)[1] is not None
    assert looked_at(problem, 1.0, distance=1.1e-3 * size)[1] is None
