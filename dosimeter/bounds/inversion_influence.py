"""The published first-order estimate of how far noise moves a recovered input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.engines.bounds.remaining_error import quadrature
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.options import PositiveInt
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling


@BOUNDS.register("inversion_influence")
@dataclass(frozen=True, kw_only=True)
class InversionInfluence(Bound):
    """Estimates the PSNR by how far the update's noise moves the solution of an exact inversion.

    Zhang, Hong, Sun & Zhou, "Understanding Deep Gradient Leakage via Inversion Influence Functions", NeurIPS 2023 (I²F): the noise δ moves
    the recovered input by ‖(JᵀJ)⁻¹ Jᵀ δ‖, which is at least ‖Jᵀ δ‖ / λmax(JᵀJ). The value is the PSNR of this lower bound, averaged over δ.
    It is the published baseline beside `van_trees`. It knows no prior: where the noise is large, the error may exceed that of the mean
    image.
    `details["fisher_leakage"]` is the square root of the largest eigenvalue of the Fisher information JᵀJ (Hannun, Guo & van der Maaten,
    "Measuring Data Leakage in Machine-Learning Models with Fisher Information", UAI 2021), and `mean_fisher_leakage` that of its mean one
    (Guo, Karrer, Chaudhuri & van der Maaten, "Bounding Training Data Reconstruction in Private (Deep) Learning", ICML 2022).
    Departure: the average over δ is taken in closed form, E ‖Jᵀ δ‖² = tr JᵀJ with the update in units of its noise.
    """

    surface: ClassVar[str] = "inputs"
    metric: ClassVar[str] = "psnr"

    probes: PositiveInt = 4
    steps: PositiveInt = 20

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        problem = PixelProblem(mechanism, self.name)
        signs = torch.randint(0, 2, (self.probes, problem.size), generator=rng, device=rng.device).double() * 2 - 1
        influence, leakage = [], []
        for sample, own in enumerate(problem.inputs):
            nodes, weights = quadrature(problem.information(sample, own[None]), signs, self.steps)
            trace, largest = float((weights * nodes).sum(1).mean()), float(nodes.max())
            leakage.append([math.sqrt(largest), math.sqrt(trace / problem.size)])
            influence.append(trace / largest**2 if largest > 0 else math.inf)  # squared, summed over the pixels
        values = [10 * (math.log10(problem.size) - _log10(squared)) for squared in influence]
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.tensor(values, dtype=torch.float64),
            proved=False,
            assumptions=(
                "Near the true input the update is linear.",
                "The attacker inverts the update exactly, and has no prior.",
                "The attacker knows the labels and the other samples.",
            ),
            details={
                "squared_influence": influence,
                "fisher_leakage": [most for most, _ in leakage],
                "mean_fisher_leakage": [mean for _, mean in leakage],
                "numbers": problem.size,
            },
        )


def _log10(squared: float) -> float:
    return -math.inf if squared == 0 else math.log10(squared)
