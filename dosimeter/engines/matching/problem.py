"""What an attack is to solve: an exposure, the labels to guess under, a recipe, and the objective that follows from them."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.matching.guess import Guess, guess_under, make_guess
from dosimeter.engines.matching.objective import Objective
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.interfaces import Exposure
from dosimeter.types import LabelEstimate

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an attack is to solve. Nothing in it changes while the attack runs."""

    exposure: Exposure  # in one precision
    labels: LabelEstimate | None
    recipe: Recipe
    guess: Guess
    objective: Objective
    widened: bool  # the model came in half precision

    @property
    def device(self) -> torch.device:
        return self.guess.low.device

    @property
    def update_is_zero(self) -> bool:
        return all(not bool(change.any()) for change in self.objective.target.values())

    def under(self, recipe: Recipe) -> Problem:
        """The same problem under a recipe with other priors."""
        return dataclasses.replace(self, recipe=recipe, objective=self.objective.under(recipe))

    def phase(self, step: int) -> tuple[object, ...]:
        """What the objective is made of at a step. Guesses are comparable only within one phase."""
        recipe, progress = self.recipe, step / self.recipe.steps
        weights = tuple(prior.weight_at(progress) for prior in recipe.priors)
        matched = recipe.layers.at(progress, self.objective.names)
        return matched, weights, progress >= recipe.matching_onset, progress >= recipe.consistency_onset

    def begins_phase(self, step: int) -> bool:
        return step == 0 or self.phase(step) != self.phase(step - 1)


def make_problem(exposure: Exposure, labels: LabelEstimate | None, recipe: Recipe) -> Problem:
    """The problem of a recipe on an exposure; refused where nothing tells the batch size or the labels."""
    wide = in_one_precision(exposure)
    guess = make_guess(wide, labels, recipe)
    return Problem(
        exposure=wide,
        labels=labels,
        recipe=recipe,
        guess=guess,
        objective=Objective(wide, recipe, guess.targets),
        widened=wide.model is not exposure.model,
    )


def problem_under(exposure: Exposure, targets: Tensor, recipe: Recipe) -> Problem:
    """The problem of a recipe under given targets: (B,) class ids or (B, C) soft labels."""
    wide = in_one_precision(exposure)
    guess = guess_under(wide, len(targets), targets.to(next(iter(wide.update.values())).device))
    objective = Objective(wide, recipe, guess.targets)
    return Problem(exposure=wide, labels=None, recipe=recipe, guess=guess, objective=objective, widened=wide.model is not exposure.model)


def in_one_precision(exposure: Exposure) -> Exposure:
    """The exposure with its update in the model's precision. Half precision becomes single, since squares of gradients leave its range."""
    model = exposure.model
    if any(parameter.dtype in HALF for parameter in model.parameters()):
        model = copy.deepcopy(model).float()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if model is exposure.model and all(change.dtype == dtypes[name] for name, change in exposure.update.items()):
        return exposure
    return dataclasses.replace(exposure, model=model, update={name: change.to(dtypes[name]) for name, change in exposure.update.items()})


def in_double_precision(problem: Problem) -> Problem:
    """The same problem on a float64 copy of the model and the update."""
    exposure, guess = problem.exposure, problem.guess
    update = {name: change.double() for name, change in exposure.update.items()}
    exposure = dataclasses.replace(exposure, model=copy.deepcopy(exposure.model).double(), update=update)
    targets = guess.targets if guess.targets is None or not guess.targets.is_floating_point() else guess.targets.double()
    recipe = dataclasses.replace(problem.recipe, precision="fp32")
    return dataclasses.replace(
        problem,
        exposure=exposure,
        recipe=recipe,
        guess=dataclasses.replace(guess, targets=targets, low=guess.low.double(), high=guess.high.double()),
        objective=Objective(exposure, recipe, targets),
    )
