"""A small exposure and a recipe, of which the tests of the loop's parts change what they need."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.problem import Problem, make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate


@pytest.fixture
def exposed() -> tuple[dm.Exposure, dm.LabelEstimate]:
    """A convolution and a linear layer, in double precision, and two samples of classes 1 and 4."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)).double().eval()
        batch = dm.Batch(torch.rand(2, 1, 6, 6).double(), torch.tensor([1, 4]))
    labels = dm.LabelEstimate(counts=torch.bincount(batch.targets, minlength=5), labels=batch.targets)
    return dm.observe(model, batch), labels


@pytest.fixture
def make(exposed) -> Callable[..., Problem]:
    """The problem of a recipe, of which each test changes what it needs."""

    def build(**changes) -> Problem:
        recipe = Recipe(**({"distance": Cosine(), "optimiser": Adam(sign="signed"), "rate": Rate(start=0.1), "steps": 60} | changes))
        return make_problem(*exposed, recipe)

    return build
