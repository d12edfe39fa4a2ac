"""What the attacks by gradient matching have in common: an objective that can be evaluated at inputs other than their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from dosimeter.engines.matching.problem import problem_under
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.surroundings import surroundings
from dosimeter.engines.matching.terms import evaluate_final
from dosimeter.interfaces import Attack, Exposure
from dosimeter.types import Reconstruction


@dataclass(frozen=True, kw_only=True)
class MatchingAttack(Attack):
    """An attack that minimises the objective of a recipe."""

    def objective(self, exposure: Exposure, found: Reconstruction, inputs: Tensor, targets: Tensor) -> float | None:
        return objective_at(exposure, found.recipe, inputs, targets) if isinstance(found.recipe, Recipe) else None


def objective_at(exposure: Exposure, recipe: Recipe, inputs: Tensor, targets: Tensor) -> float:
    """The final objective of a recipe, priors included, at any inputs (B, *shape) and targets (B,) or (B, C).

    A model that draws random numbers draws the same ones at every call.
    """
    problem = problem_under(exposure, targets, recipe)
    with surroundings(problem, Generator().manual_seed(0)):
        return float(evaluate_final(problem, inputs[None]).objective[0])
