"""The targets of a regression, from the slopes at its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.head_slopes.factors import HeadFactors, take_apart
from dosimeter.engines.head_slopes.target_by_slope import inverse_of
from dosimeter.engines.premises import premises_of
from dosimeter.engines.subspace.problem import may_be_scaled
from dosimeter.interfaces import Exposure, TargetRecovery
from dosimeter.network.head import CLOSINGS, Head, find_head
from dosimeter.options import NonNegativeInt
from dosimeter.registry import TARGETS
from dosimeter.types import Knowledge, Outcome, Refused, TargetEstimate

MIXING_CLOSINGS = ("softmax", "log_softmax")
UNKNOWN_SIZE = "guesses only: a target is read off the batch size times a slope, and no batch size is declared"


@TARGETS.register("head_slopes")
@dataclass(frozen=True, kw_only=True)
class HeadSlopes(TargetRecovery):
    """Reads each target off the slope at its output: t = z − B K d / 2 under the mean squared error over K outputs.

    Ours; in no paper. The head's gradient is Σ dᵢ fᵢᵀ with dᵢ = 2 (zᵢ − tᵢ) / (B K). Where it falls apart into features and slopes
    (engines/head_slopes/factors.py), the head itself gives z = W f + b, and the slope gives the target. That is so for one sample, and
    for features behind a ReLU. Other features are refused: any mixing of the samples has the same gradient at the head, with other
    targets, so that the head alone determines none of them.
    A sigmoid, tanh or softplus behind the head is undone, and so is a sum over the batch. The slopes of HuberLoss, SmoothL1Loss and
    PoissonNLLLoss are inverted likewise; a slope at their limit bounds its target and proves nothing.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})
    reads_closings = True

    seed: NonNegativeInt = 0  # of the linear programs

    def __call__(self, exposure: Exposure, rng: Generator) -> TargetEstimate:
        public, head = exposure.public, find_head(exposure, closings=True)
        output = (head.classes,) if public.output_shape is None else public.output_shape
        inverse = inverse_of(public.loss, output, self.name)
        if may_be_scaled(public):
            raise Refused(f"{self.name} needs the scale of the gradient, and a defense may have changed it")
        factors = take_apart(exposure, head, self.seed)
        size = public.batch_size or len(factors.features)
        scale = inverse.scale(size, head.classes)
        outputs, steepness = _outputs(head, factors.features)
        steps = inverse.gain * scale * factors.slopes / steepness  # (n, K) from the targets to the outputs
        targets = inverse.center(outputs) - steps
        bars = _bars(head, factors, inverse.gain * scale, inverse.steepest(outputs)) * (_bent(steps, steepness) if head.closing else 1)
        within = steps.abs().amax(1) + bars < inverse.gain * inverse.limit
        doubt = factors.doubt or (UNKNOWN_SIZE if public.batch_size is None and inverse.over_batch else "")
        certified = factors.certified & within & (not doubt)
        count, known = len(targets), int(certified.sum())
        return TargetEstimate(
            targets=targets.reshape(count, *output),
            certified=certified,
            error_bars=bars,
            premises=premises_of(public) if known else (),
            outcome=Outcome.COMPLETED if known == count else Outcome.PARTIAL,
            message=doubt or _at_the_limit(int((~within).sum()), count),
        )


def _at_the_limit(beyond: int, count: int) -> str:
    if not beyond:
        return ""
    return (
        f"{beyond} of {count} samples have an output whose slope is at the loss's limit: the target there is at least as far away as shown"
    )


def _outputs(head: Head, features: Tensor) -> tuple[Tensor, Tensor]:
    """What the model gives for features, and its slopes at the head's own outputs: (n, K) each."""
    logits = head.logits(features).detach().requires_grad_()
    if head.closing in MIXING_CLOSINGS:
        raise Refused(f"a {head.closing} follows the head, which mixes the outputs, so that a slope is not that of one output")
    with torch.enable_grad():
        outputs = CLOSINGS[head.closing](logits) if head.closing else logits * 1
        (steepness,) = torch.autograd.grad(outputs.sum(), logits)
    return outputs.detach(), steepness


def _bent(steps: Tensor, steepness: Tensor) -> Tensor:
    """By how much errors grow where t = g(z) − d / g′(z) is read through a function with |g″| ≤ 2 g′, such as tanh: (n,)."""
    return (1 + 2 * steps.abs().amax(1)) / steepness.amin(1).clamp(1e-30, 1)


def _bars(head: Head, factors: HeadFactors, scale: float, steepest: Tensor) -> Tensor:
    """How far each target may be off: what the feature's error moves the output by, and the slope's own error: (n,)."""
    longest = torch.linalg.vector_norm(head.weight.double(), dim=1).max()
    moved = steepest * longest * factors.features.norm(dim=1) + scale * factors.slopes.norm(dim=1)
    return factors.error_bar * moved + scale * math.sqrt(head.classes) * factors.slope_error
