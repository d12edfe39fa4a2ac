"""The target of an output from the slope there, for losses whose slope grows with the distance to the target and with nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.client.losses import OwnLoss, SquaredError
from dosimeter.interfaces import Loss
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class SlopeInverse:
    """t = center(z) − gain · u for |u| < limit, where u is the slope at output z of the loss of one output, before any mean."""

    gain: float
    limit: float = math.inf  # a slope of this size tells only that the target is farther away
    exponential: bool = False  # the center is exp(z), else z
    over_outputs: bool  # the loss is a mean over outputs, else a sum
    over_batch: bool

    def scale(self, size: int, outputs: int) -> float:
        """u over the slope of the loss of the batch."""
        return (size if self.over_batch else 1) * (outputs if self.over_outputs else 1)

    def center(self, outputs: Tensor) -> Tensor:
        return outputs.exp() if self.exponential else outputs

    def steepest(self, outputs: Tensor) -> Tensor:
        """By how much an error of the outputs grows in the center: (n,)."""
        return outputs.amax(1).exp() if self.exponential else torch.ones_like(outputs[:, 0])


def inverse_of(loss: Loss, output: tuple[int, ...], name: str) -> SlopeInverse:
    """How the loss's slope is undone for outputs of the shape `output`; refused where it is not."""
    if isinstance(loss, SquaredError):
        return SlopeInverse(gain=0.5, over_outputs=loss.over_outputs == "mean", over_batch=loss.over_batch == "mean")
    function = loss.function if isinstance(loss, OwnLoss) else None
    if isinstance(function, nn.L1Loss):
        raise Refused(f"{name} reads a target off the size of a slope; under L1Loss every slope has the same size, and tells a side alone")
    known = _of_module(function) if getattr(function, "reduction", "") in ("mean", "sum") else None
    if known is None:
        raise Refused(
            f"{name} inverts the slopes of squared_error, HuberLoss, SmoothL1Loss and PoissonNLLLoss; the client trains with {loss.said()}"
        )
    if loss.target_shape(output) != output:
        raise Refused(f"{name} needs a target for each output; targets of shape {loss.target_shape(output)} meet outputs {output}")
    return known


def _of_module(function: object) -> SlopeInverse | None:
    mean = getattr(function, "reduction", "") == "mean"
    if isinstance(function, nn.HuberLoss):
        return SlopeInverse(gain=1.0, limit=function.delta, over_outputs=mean, over_batch=mean)
    if isinstance(function, nn.SmoothL1Loss) and function.beta > 0:
        return SlopeInverse(gain=function.beta, limit=1.0, over_outputs=mean, over_batch=mean)
    if isinstance(function, nn.PoissonNLLLoss) and function.log_input:
        return SlopeInverse(gain=1.0, exponential=True, over_outputs=mean, over_batch=mean)
    return None
