"""A matching problem: what it holds, in which precision, and when its objective changes its parts."""

import dataclasses

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.problem import in_double_precision, make_problem, problem_under
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Layers, Rate
from dosimeter.engines.matching.terms import evaluate_final


def test_a_phase_begins_where_a_layer_or_a_prior_enters(make) -> None:
    assert [step for step in range(60) if make().begins_phase(step)] == [0]
    problem = make(layers=Layers(shares=2, every=0.5), priors=(TotalVariation(weight=0.1, onset=0.25),), consistency_onset=0.75)
    assert [step for step in range(60) if problem.begins_phase(step)] == [0, 15, 30, 45]


def test_half_precision_is_widened_and_the_problem_says_so(exposed) -> None:
    exposure, labels = exposed
    half = dataclasses.replace(
        exposure, model=exposure.model.half(), update={name: change.half() for name, change in exposure.update.items()}
    )
    problem = make_problem(half, labels, Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=0.1), steps=1))
    assert problem.widened
    assert {change.dtype for change in problem.objective.target.values()} == {torch.float32}
    assert problem.guess.low.dtype == torch.float32


def test_double_precision_has_the_same_objective(exposed) -> None:
    exposure, _ = exposed
    single = dm.observe(exposure.model.float(), dm.Batch(torch.full((2, 1, 6, 6), 0.3), torch.tensor([0, 2])))
    problem = problem_under(single, torch.tensor([1, 3]), Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=0.1), steps=1))
    inputs = torch.rand(1, 2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    double = in_double_precision(problem)
    wide, narrow = (evaluate_final(one, inputs).objective for one in (double, problem))
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    assert float(wide) == pytest.approx(float(narrow), rel=1e-5)


def test_nothing_in_a_problem_can_be_set(make) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().recipe = None
