"""How much of an input an update without noise leaves in the dark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator

from dosimeter.engines.bounds.budget import fewer_steps, too_long
from dosimeter.engines.bounds.pixel_prior import NOISE_TELLS, PixelProblem
from dosimeter.engines.bounds.remaining_error import EXACT_UP_TO, EXTRA_PROBES
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.options import PositiveInt
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling


@BOUNDS.register("hidden_directions")
@dataclass(frozen=True, kw_only=True)
class HiddenDirections(Bound):
    """Estimates the PSNR that is lost in the directions of the input which the update does not show above its noise.

    Ours. Around the true input, the update is linear: its Jacobian J turns a small change of the input into a change of the update.
    Rounding, or the
    client's noise, hides the directions in which that change is small. The estimate is the squared error that remains there under a
    Gaussian
    prior, tr (JᵀJ + Λ⁻¹)⁻¹, as if the update were linear everywhere. It is exact for updates that are. For others it is an estimate: an
    attacker may use what lies beyond
    the linear part, and most attackers do not even find the linear part.
    """

    surface: ClassVar[str] = "inputs"
    metric: ClassVar[str] = "psnr"

    probes: PositiveInt = 6
    steps: PositiveInt = 12

    def within(self, products: float, numbers: int) -> Bound:
        if numbers > EXACT_UP_TO:
            return replace(self, steps=fewer_steps(self.name, self.steps, products, self.probes + EXTRA_PROBES))
        if products < numbers:
            raise too_long(self.name)
        return self

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        problem = PixelProblem(mechanism, self.name)
        found = [problem.local_error(sample, probes=self.probes, steps=self.steps, rng=rng) for sample in range(len(problem.inputs))]
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.tensor([error.psnr() for error in found], dtype=torch.float64),
            proved=False,
            assumptions=(
                "Near the true input the update is linear.",
                "Inputs are drawn independently of one another, from a Gaussian with the mean and covariance of the auxiliary samples.",
                "The attacker knows the labels and the other samples.",
                "The update is sent once.",
                "The noise is the client's own." if mechanism.declared else "The only noise is the rounding of the update's entries.",
                *((NOISE_TELLS,) if not mechanism.fixed_noise else ()),
            ),
            details={
                "prior_psnr": [problem.prior_psnr] * len(found),
                "interval": [[error.psnr(end="low"), error.psnr(end="high")] for error in found],
                "hidden": [error.hidden for error in found],
                "bits": [error.bits for error in found],
                "numbers": problem.size,
            },
        )
