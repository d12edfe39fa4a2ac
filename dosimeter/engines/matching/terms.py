"""The weights of the objective's parts over the steps of an attack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.objective import Terms
from dosimeter.engines.matching.paths import Eager, Evaluation
from dosimeter.engines.matching.problem import Problem

LayerNames = tuple[str, ...]


class TermSchedule:
    """The matched layers and the weight of every part of the objective, by the fraction of the steps that is done.

    An evaluator with `one_layer_set` wants the same layers at every step. Weights of 0 then switch off the layers that have not entered.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._constants: dict[tuple[float, ...], Tensor] = {}

    def at(self, progress: float, rng: Generator, *, one_layer_set: bool = False) -> tuple[LayerNames, Terms]:
        """The terms of a step, with a fresh dropout mask where the recipe wants one."""
        names, terms = self._without_masks(progress, one_layer_set)
        dropout = self.problem.recipe.dropout
        if dropout == 0:
            return names, terms
        return names, _with_masks(terms, _draw_masks(self._targets(names), dropout, rng))

    def final(self, *, one_layer_set: bool = False) -> tuple[LayerNames, Terms]:
        """The terms after the last step, by which restarts are compared: without dropout."""
        names, terms = self._without_masks(1.0, one_layer_set)
        if self.problem.recipe.dropout == 0 or not one_layer_set:
            return names, terms
        return names, _with_masks(terms, tuple(torch.ones_like(target) for target in self._targets(names)))

    def _without_masks(self, progress: float, one_layer_set: bool) -> tuple[LayerNames, Terms]:
        recipe, all_names = self.problem.recipe, self.problem.objective.names
        matched = recipe.layers.at(progress, all_names)
        names = recipe.layers.ever(all_names) if one_layer_set else matched
        layers = None
        if recipe.layer_weights is not None or (one_layer_set and recipe.layers.shares > 1):
            given = recipe.layer_weights or {}
            layers = self._constant(*(given.get(name, 1.0) * (name in matched) for name in names))
        priors = self._constant(*(prior.weight_at(progress) for prior in recipe.priors))
        matching = self._constant(float(progress >= recipe.matching_onset))[0]
        return names, Terms(matching=matching, priors=priors, layers=layers)

    def _targets(self, names: LayerNames) -> list[Tensor]:
        return [self.problem.objective.target[name] for name in names]

    def _constant(self, *values: float) -> Tensor:
        """Numbers on the device. They are copied there once, since every copy waits until the device is idle."""
        if values not in self._constants:
            self._constants[values] = self.problem.guess.low.new_tensor(values)
        return self._constants[values]


def evaluate_final(problem: Problem, inputs: Tensor) -> Evaluation:
    """The final objective of inputs (R, B, *shape), and its gradient, by plain double backward."""
    names, terms = TermSchedule(problem).final()
    return Eager(problem.objective)(inputs.to(problem.guess.low), None, names, terms)


def _with_masks(terms: Terms, masks: tuple[Tensor, ...]) -> Terms:
    return Terms(matching=terms.matching, priors=terms.priors, layers=terms.layers, masks=masks)


def _draw_masks(like: Sequence[Tensor], dropout: float, rng: Generator) -> tuple[Tensor, ...]:
    """One draw for all layers: 1 where an entry is seen, 0 for a share `dropout` of the entries."""
    sizes = [tensor.numel() for tensor in like]
    seen = (torch.rand(sum(sizes), generator=rng, device=rng.device) >= dropout).to(like[0])
    return tuple(part.view(tensor.shape) for part, tensor in zip(seen.split(sizes), like))
