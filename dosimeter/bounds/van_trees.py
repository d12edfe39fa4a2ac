"""The best mean squared error that any attacker reaches behind noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, nn

from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, SquaredError
from dosimeter.client.training import FedAvg, FedSGD, MeanOfClients
from dosimeter.defenses.dpsgd import ClippedSGD
from dosimeter.engines.bounds.budget import fewer_steps, too_long
from dosimeter.engines.bounds.pixel_prior import GROUPS, NOISE_TELLS, PROVING_POINTS, PixelProblem
from dosimeter.engines.bounds.remaining_error import EXACT_UP_TO, EXTRA_PROBES
from dosimeter.interfaces import Bound, Client, Mechanism, Training
from dosimeter.options import PositiveInt
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling, Refused

SMOOTH = (nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus, nn.Mish)
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
PLAIN += (nn.Flatten, nn.Unflatten, nn.Identity, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d, nn.Dropout)
SMOOTH_LOSSES = (CrossEntropy, BinaryCrossEntropy, SquaredError)
LEAST_THRESHOLD = 20.0  # of a softplus, which jumps where it turns linear: at most 2e-9 from there on
PRECISE = (torch.float32, torch.float64)
KINKED = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)

WHOLE_MATRIX_PRODUCTS = 2048  # with the Jacobian of an input that is small enough for the whole of it: less than an attack costs
MOST_POINTS, LARGE_INPUT_POINTS = 128, 2  # draws of the prior


@BOUNDS.register("van_trees")
@dataclass(frozen=True, kw_only=True)
class VanTrees(Bound):
    """Limits the mean PSNR of any attacker behind noise, biased or not, who has a Gaussian prior.

    Van Trees, "Detection, Estimation, and Modulation Theory" I, 1968, Section 2.4.3 (the Bayesian Cramér–Rao bound): the mean squared
    error is at least tr (E F + Λ⁻¹)⁻¹. F is the Fisher information of the noisy update about the sample's pixels, averaged over `points`
    draws of the prior in the sample's place, and Λ is the covariance of auxiliary samples. The plain Cramér–Rao bound, tr F⁻¹, binds
    only unbiased attackers and is not used.
    Departure: few draws make the trace too large. The jackknife takes that off, and the value is the upper end of its 99 % interval.
    With fewer than 16 draws there is no such interval, and the value is an estimate. Unless `points` says otherwise, inputs of up to 256
    numbers get 16 to 128 draws, and larger ones 2.
    """

    surface: ClassVar[str] = "inputs"
    metric: ClassVar[str] = "psnr"

    points: PositiveInt | None = None  # none: by the size of the input
    probes: PositiveInt = 6
    steps: PositiveInt = 12

    def within(self, products: float, numbers: int) -> Bound:
        if numbers <= EXACT_UP_TO:
            points, allowed = self.points or _small_input_points(numbers), int(products // numbers)
            if allowed < LARGE_INPUT_POINTS:
                raise too_long(self.name)
            return self if points <= allowed else replace(self, points=allowed)
        points = self.points or LARGE_INPUT_POINTS
        if points >= PROVING_POINTS:
            points *= GROUPS  # each leaves a group out
        return replace(self, steps=fewer_steps(self.name, self.steps, products, (self.probes + EXTRA_PROBES) * (points + points // 2)))

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        if not mechanism.declared:
            raise Refused("van_trees needs noise on the update; without it, hidden_directions estimates what rounding leaves")
        problem = PixelProblem(mechanism, self.name)
        count = self.points or (_small_input_points(problem.size) if problem.is_small else LARGE_INPUT_POINTS)
        if self.points is None and not problem.jacobian.separable:  # every product takes a pass of the whole batch
            count = min(count, PROVING_POINTS)
        points = problem.prior.draw(count, rng)
        found = [problem.mean_error(sample, points, probes=self.probes, steps=self.steps, rng=rng) for sample in range(len(problem.inputs))]
        switches = [name for name, module in mechanism.client.model.named_modules() if isinstance(module, KINKED)]
        proves = not switches and _is_smooth(mechanism.client) and mechanism.fixed_noise and count >= PROVING_POINTS
        steep = proves and any(problem.hides_steps(sample, rng) for sample in range(len(problem.inputs)))
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.tensor([error.psnr() for error in found], dtype=torch.float64),
            proved=proves and not steep,
            assumptions=(
                "Inputs are drawn independently of one another, from a Gaussian with the mean and covariance of the auxiliary samples.",
                "The attacker knows the labels, the other samples and the noise.",
                "The value limits the mean squared error over inputs and noise; a single guess may be luckier.",
                "The update is sent once.",
                _average_words(count),
                *(("Where a unit switches, the update jumps; what the jumps tell is not counted.",) if switches else ()),
                *(("Between inputs, the update moves more than its slopes explain, as steep units make it.",) if steep else ()),
                *((NOISE_TELLS,) if not mechanism.fixed_noise else ()),
            ),
            details={
                "prior_psnr": [problem.prior_psnr] * len(found),
                "interval": [[error.psnr(end="low"), error.psnr(end="high")] for error in found],
                "hidden": [error.hidden for error in found],
                "bits": [error.bits for error in found],
                "numbers": problem.size,
                "points": count,
            },
        )


def _small_input_points(numbers: int) -> int:
    return min(max(WHOLE_MATRIX_PRODUCTS // numbers, PROVING_POINTS), MOST_POINTS)


def _average_words(points: int) -> str:
    certain = (
        "too few to say how far the average may be off" if points < PROVING_POINTS else "and the value is the end of its 99 % interval"
    )
    return f"The update's information is averaged over {points} draws of such inputs, {certain}."


def _is_smooth(client: Client) -> bool:
    """Whether the layers, the loss and the training are known smooth ones, and the layers run one after another.

    So nothing can hide a switch. An optimiser that divides by the gradient's own size is nearly its sign.
    """
    if type(client.loss) not in SMOOTH_LOSSES or not _trains_smoothly(client.training):
        return False
    if _hooked_everywhere() or any(parameter.dtype not in PRECISE for parameter in client.model.parameters()):
        return False
    return all(type(module) in (nn.Sequential, *SMOOTH, *PLAIN) and not _may_jump(module) for module in client.model.modules())


def _trains_smoothly(training: Training) -> bool:
    """Whether the same update comes of the same samples, in full precision."""
    if isinstance(training, MeanOfClients):
        return type(training) is MeanOfClients and _trains_smoothly(training.each)
    if type(training) is FedAvg:
        return not training.preconditioning() and training.autocast is None and not training.shuffle
    return type(training) in (FedSGD, ClippedSGD)


def _may_jump(module: nn.Module) -> bool:
    """Whether more runs than the layer's own class says, or its options let it jump."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    replaced = any(callable(value) for value in vars(module).values())
    return replaced or any(hooks) or (isinstance(module, nn.Softplus) and module.threshold < LEAST_THRESHOLD)


def _hooked_everywhere() -> bool:
    """Whether torch runs hooks on modules of all kinds."""
    of_all = vars(nn.modules.module)
    return any(of_all.get(f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre"))
