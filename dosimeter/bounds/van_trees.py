"""The best mean squared error that any attacker reaches behind noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, nn

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, SquaredError
from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.engines.bounds.remaining_error import EXTRA_PROBES, RemainingError
from dosimeter.interfaces import Bound, Client, Mechanism
from dosimeter.options import PositiveInt
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling, Refused

SMOOTH = (nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus, nn.Mish)
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
PLAIN += (nn.Flatten, nn.Unflatten, nn.Identity, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d, nn.Dropout)
SMOOTH_LOSSES = (CrossEntropy, BinaryCrossEntropy, SquaredError)
KINKED = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


@BOUNDS.register("van_trees")
@dataclass(frozen=True, kw_only=True)
class VanTrees(Bound):
    """Limits the mean PSNR of any attacker behind noise, biased or not, who has a Gaussian prior.

    Van Trees, "Detection, Estimation, and Modulation Theory" I, 1968, Section 2.4.3 (the Bayesian Cramér–Rao bound): the mean squared
    error is at least tr (E F + Λ⁻¹)⁻¹. F is the Fisher information of the noisy update about the sample's pixels, averaged over `points`
    draws of the prior in the sample's place, and Λ is the covariance of auxiliary samples. The plain Cramér–Rao bound, tr F⁻¹, binds
    only unbiased attackers and is not used.
    Departure: few draws make the trace too large. The trace of half as many draws shows by how much, and the difference is taken off.
    """

    surface: ClassVar[str] = "inputs"
    metric: ClassVar[str] = "psnr"

    points: PositiveInt = 2
    probes: PositiveInt = 6
    steps: PositiveInt = 12

    @property
    def products_a_step(self) -> int:
        """With the Fisher information, for each sample and Lanczos step."""
        return (self.probes + EXTRA_PROBES) * (self.points + self.points // 2)

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        if not mechanism.declared:
            raise Refused("van_trees needs noise on the update; without it, hidden_directions estimates what rounding leaves")
        problem = PixelProblem(mechanism, self.name)
        points = problem.prior.draw(self.points, rng)
        found = [self._sample(problem, sample, points, rng) for sample in range(len(problem.inputs))]
        switches = [name for name, module in mechanism.client.model.named_modules() if isinstance(module, KINKED)]
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.tensor([error.psnr() for error in found], dtype=torch.float64),
            proved=not switches and _is_smooth(mechanism.client),
            assumptions=(
                "Inputs are drawn from a Gaussian with the mean and covariance of the auxiliary samples.",
                "The attacker knows the labels, the other samples and the noise.",
                "The value limits the mean squared error over inputs and noise; a single guess may be luckier.",
                *(("Where a unit switches, the update jumps; what the jumps tell is not counted.",) if switches else ()),
            ),
            details={
                "prior_psnr": [problem.prior_psnr] * len(found),
                "interval": [[error.psnr(end="low"), error.psnr(end="high")] for error in found],
                "hidden": [error.hidden for error in found],
                "bits": [error.bits for error in found],
                "numbers": problem.size,
            },
        )

    def _sample(self, problem: PixelProblem, sample: int, points: torch.Tensor, rng: Generator) -> RemainingError:
        whole = problem.mean_error(sample, points, probes=self.probes, steps=self.steps, rng=rng)
        if self.points == 1:
            return whole
        half = problem.mean_error(sample, points[: self.points // 2], probes=self.probes, steps=self.steps, rng=rng)
        return whole.less(max(half.squared - whole.squared, 0.0) * (self.points // 2) / (self.points - self.points // 2))


def _is_smooth(client: Client) -> bool:
    """Whether the layers, the loss and the training are known smooth ones, and the layers run one after another.

    So nothing can hide a switch. An optimiser that divides by the gradient's own size is nearly its sign.
    """
    if type(client.loss) not in SMOOTH_LOSSES or client.training.preconditioning():
        return False
    return all(type(module) in (nn.Sequential, *SMOOTH, *PLAIN) for module in client.model.modules())
