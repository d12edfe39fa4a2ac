"""R-GAP: one sample, solved back through a plain network layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from dosimeter.engines.recursion.layer_equations import Solution, output_equations, slope_equations, solve, stack
from dosimeter.engines.recursion.one_sample import reconstruct_one
from dosimeter.engines.recursion.plain_walk import Step
from dosimeter.interfaces import Attack, Exposure
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction


@ATTACKS.register("rgap")
@dataclass(frozen=True, kw_only=True)
class RGAP(Attack):
    """Solves each layer's input from the layer's outputs and gradient, from the last layer to the first.

    Zhu and Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021, Algorithm 1; thesis Eq. (2.6): W x = z and ∇Z x = ∇W are
    linear in a layer's input x. The slopes at the logits come from the head's bias gradient, or from the product of a logit and its
    slope. Two logits can have that product; the twin is then named. The message holds the rank analysis: the unknowns of each layer that
    its equations leave open.
    Departures: the two kinds of equations are scaled to one size before least squares. A linear layer uses every row. Softmax
    cross-entropy takes its scale from the label's form (soft-labels Eqs. 2-5); the paper has one logit. Behind a ReLU only units that
    fire give output equations. Everything runs in float64.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE})

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        return reconstruct_one(exposure, labels, self.name, solve_input)


def solve_input(step: Step) -> Solution:
    """The input that fits the outputs and the gradient best; of several the one of least norm (thesis Eq. 2.6)."""
    return solve(stack(output_equations(step.link, step.outputs), slope_equations(step.link, step.slopes, step.gradient)))
