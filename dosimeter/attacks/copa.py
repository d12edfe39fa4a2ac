"""COPA: one sample, solved back through a plain network, with help from the layer in front where a layer's own equations are too few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.attacks.rgap import solve_input
from dosimeter.engines.recursion.layer_equations import Equations, Solution, output_equations, output_matrix, slope_equations, solve, stack
from dosimeter.engines.recursion.one_sample import reconstruct_one
from dosimeter.engines.recursion.plain_walk import Step
from dosimeter.interfaces import Attack, Exposure
from dosimeter.network.chain import Activation
from dosimeter.options import PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction

HALVINGS = 8  # of a step that makes the fit worse
REST = 1e-12  # relative gain of a step below which the search ends


@ATTACKS.register("copa")
@dataclass(frozen=True, kw_only=True)
class COPA(Attack):
    """Solves each layer's input from the layer's outputs and gradient, and from what the layer in front can give at all.

    Chen and Campbell, "Understanding Training-Data Leakage from Gradients in Neural Networks for Image Classification",
    arXiv:2111.10178, 2021; thesis Section 2.2.2 and Eq. (2.6). For each layer, from the last to the first, the squares of W x − z and of
    ∇Z x − ∇W are minimised. Where these leave x open, a pull-back constraint ties x to the layer in front: x = σ(W' u + b'), with u that
    layer's unknown input.
    Departures: the paper leaves the solver of the pull-back open; here it is Gauss–Newton in u, used where u has fewer entries than x.
    The slopes at the logits, the scaling of equations and ReLU are those of `rgap`.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE})

    iterations: PositiveInt = 20  # of the pull-back, at most

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        return reconstruct_one(exposure, labels, self.name, self.solve_input)

    def solve_input(self, step: Step) -> Solution:
        """As R-GAP does, then with the pull-back constraint where unknowns are left."""
        found, link, below = solve_input(step), step.link, step.below
        if found.rank == len(found.value) or below is None or link.before is None or not isinstance(below.module, nn.Conv2d):
            return found
        if below.shape[0] * below.shape[1] * below.shape[2] >= len(found.value):
            return found
        equations = stack(output_equations(link, step.outputs), slope_equations(link, step.slopes, step.gradient))
        matrix = output_matrix(below)
        bias = 0.0 if below.module.bias is None else below.module.bias.detach().double().repeat_interleave(link.shape[1] * link.shape[2])
        return _pull_back(equations, matrix, bias, link.before, found.value, self.iterations)


def _pull_back(equations: Equations, matrix: Tensor, bias: Tensor | float, activation: Activation, start: Tensor, steps: int) -> Solution:
    """min_u ‖A σ(W' u + b') − b‖² by Gauss–Newton with halved steps, from the u whose image is nearest to `start`."""
    before = activation.inverse(start)
    before = torch.where(before.isfinite(), before, start)
    unknown = solve(Equations(matrix=matrix, wanted=before - bias)).value

    def off(values: Tensor) -> Tensor:
        return equations.wanted - equations.matrix @ activation.apply(matrix @ values + bias)

    left, rank = off(unknown), 0
    for _ in range(steps):
        slope = activation.slope(activation.apply(matrix @ unknown + bias))
        step = solve(Equations(matrix=equations.matrix @ (slope[:, None] * matrix), wanted=left))
        length, rank = 1.0, step.rank
        trial = off(unknown + step.value)
        for _ in range(HALVINGS):
            if bool(trial.norm() < left.norm()):
                break
            length /= 2
            trial = off(unknown + length * step.value)
        gained = bool(trial.norm() < (1 - REST) * left.norm())
        if bool(trial.norm() < left.norm()):
            unknown, left = unknown + length * step.value, trial
        if not gained:
            break
    value = activation.apply(matrix @ unknown + bias)
    return Solution(value=value, rank=len(value) - (len(unknown) - rank))
