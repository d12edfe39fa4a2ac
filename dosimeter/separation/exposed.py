"""An exposure's head as a separation problem: what the loss, the training and the defenses mean for the equations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor

from dosimeter.head import Head
from dosimeter.interfaces import Training
from dosimeter.losses import CrossEntropy
from dosimeter.separation.equations import Equations, build_equations, mean_coordinates
from dosimeter.separation.separate import Separation, separate
from dosimeter.separation.smoothing import estimate_smoothing, with_smoothing
from dosimeter.separation.spectrum import factor, rounding_unit
from dosimeter.training import FedAvg, FedSGD
from dosimeter.types import Exposure, LabelEstimate, Public, Refused

SCALE_KEPT = frozenset({"gaussian_noise", "laplace_noise", "pruning", "quantisation", "low_rank", "bias_withheld", "bias_free_head"})


def separate_head(
    exposure: Exposure,
    head: Head,
    labels: LabelEstimate | None,
    rng: Generator,
    *,
    method: str,
    attempts: int,
    starts: int,
    unknown_smoothing: bool = False,
) -> tuple[Separation, float]:
    """Take an exposure's head gradient apart, with labels known or unknown; and the smoothing that its loss has, or shows."""
    public = exposure.public
    gradient = _in_double(head.weight_gradient)
    assert gradient is not None
    bias_gradient = None if scaled_by_layer(public) else _in_double(head.bias_gradient)
    equations = _equations(exposure, head, gradient, bias_gradient, rng, method=method)
    if unknown_smoothing and 0 < equations.rank < equations.classes - 1:
        equations = with_smoothing(equations, estimate_smoothing(equations, mean_coordinates(equations, gradient, bias_gradient)))
    result = separate(
        equations,
        gradient,
        bias_gradient,
        counts=None if labels is None else labels.counts,
        batch_size=public.batch_size,
        free_scale=may_be_scaled(public),
        non_negative=head.non_negative,
        rng=rng,
        attempts=attempts,
        starts=starts,
    )
    if not sends_one_gradient(public.training):
        result = replace(result, certified=torch.zeros_like(result.certified))
    return result, 1 - equations.share


def _equations(exposure: Exposure, head: Head, gradient: Tensor, bias_gradient: Tensor | None, rng: Generator, *, method: str) -> Equations:
    """The head's equations; refuses losses whose gradient at the logits is not (softmax − target) up to a factor."""
    loss = exposure.public.loss
    if not isinstance(loss, CrossEntropy):
        raise Refused(f"{method} solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.name}")
    smoothing = loss.smoothing
    if loss.convention == "thesis":  # 1 − ε for the label, ε/(C − 1) for the others, is PyTorch's with another ε
        smoothing = loss.smoothing * head.classes / max(head.classes - 1, 1)
    weight = _in_double(head.weight)
    assert weight is not None
    assert head.weight_gradient is not None
    return build_equations(
        factor(gradient, rounding_unit(head.weight_gradient), rng, at_most=exposure.public.batch_size),
        weight,
        _in_double(head.bias),
        bias_gradient=bias_gradient,
        smoothing=smoothing,
        temperature=loss.temperature,
        model_unit=torch.finfo(head.weight.dtype).eps,
    )


def sends_one_gradient(training: Training) -> bool:
    """Whether the update is one gradient of one batch; several local steps add up gradients of different weights."""
    return isinstance(training, FedSGD) or (
        isinstance(training, FedAvg) and training.steps in (None, 1) and training.epochs == 1 and training.mini_batch is None
    )


def may_be_scaled(public: Public) -> bool:
    """Whether a defense in force, or a temperature, may have multiplied the gradient by a number that the server does not know."""
    return any(defense.name not in SCALE_KEPT for defense in public.defenses)


def scaled_by_layer(public: Public) -> bool:
    """Whether weight and bias gradient may have been scaled apart, so that they cannot be used together."""
    return any(getattr(defense, "mode", None) == "layer" for defense in public.defenses)


def _in_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)
