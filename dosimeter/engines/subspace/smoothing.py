"""Label smoothing of unknown strength: one more unknown in a sample's own equations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.least_squares import Damping, Parts, Problem, minimise
from dosimeter.engines.subspace.equations import Equations, Span, probabilities, project_off, slopes, weighted_errors, whole_span
from dosimeter.engines.subspace.single import linear_scan

STRENGTH_GUESSES = (0.0, 0.1, 0.2, 0.3, 0.5)  # strengths at which all classes are scanned
CLASSES_TRIED = 3  # likeliest classes, solved for at each guess
ITERATIONS = 30


def with_smoothing(equations: Equations, strength: float) -> Equations:
    """The same head under targets (1 − ε) y + ε/C."""
    return replace(equations, share=1 - strength, even=strength / equations.classes)


def estimate_smoothing(equations: Equations, start: Tensor) -> float:
    """The strength ε at which one sample's equations are solved best.

    The target (1 − ε) e_y + ε/C is linear in ε, so Gauss–Newton treats ε as one more coordinate of the sample.
    """
    span = whole_span(equations)
    best, lowest = 0.0, torch.inf
    for guess in STRENGTH_GUESSES:
        smoothed = with_smoothing(equations, guess)
        scan = linear_scan(smoothed, span, start)
        for label in scan.score.argsort()[:CLASSES_TRIED]:
            begin = torch.cat([scan.reached[label], scan.reached.new_tensor([guess])])[None]
            problem = _FreeSmoothing(equations=equations, span=span, label=label[None])
            found = minimise(problem, begin, Damping(), iterations=ITERATIONS)
            strength, value = float(found.unknowns[0, -1]), float(found.value)
            if value < lowest and 0 <= strength < 1:
                best, lowest = strength, value
    return best


@dataclass(frozen=True, kw_only=True)
class _FreeSmoothing(Problem):
    """One sample's own residual; the unknowns are its coordinates and ε. The value is relative to the size of the error."""

    equations: Equations
    span: Span
    label: Tensor  # (1,)

    def evaluate(self, unknowns: Tensor, rows: Tensor) -> tuple[Tensor, Parts]:
        equations, span, t, strength = self.equations, self.span, unknowns[:, :-1], float(unknowns[0, -1])
        p = probabilities(equations, span, t)
        error = weighted_errors(with_smoothing(equations, strength), span, p, self.label)
        even, sharp = (weighted_errors(with_smoothing(equations, end), span, p, self.label) for end in (1.0, 0.0))
        rows = torch.cat([slopes(equations, span, p)[0].T, even - sharp])  # (B + 1, C)
        residual = project_off(span, error)
        return residual.square().sum(1) / error.square().sum(1), (residual, project_off(span, rows)[None])

    def normal_equations(self, unknowns: Tensor, rows: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        residual, transposed = parts  # (1, C), (1, B + 1, C)
        return transposed @ transposed.transpose(1, 2), (transposed @ residual[:, :, None])[:, :, 0]
