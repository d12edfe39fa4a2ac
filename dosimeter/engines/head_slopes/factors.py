"""The head's gradient as a product of slopes and features, DᵀF, under any loss.

∇W = Σ dᵢ fᵢᵀ and ∇b = Σ dᵢ, whatever the loss, with dᵢ the slope of the mean loss at the outputs of sample i. One sample has its
feature as the quotient of the two. Several samples are mixed: any invertible B × B matrix gives other features and slopes with the same
product. Features behind a ReLU are the one mixture that is non-negative with many zeros (engines/shifts/unmixing.py); the bias's gradient
then gives each one's scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.client.losses import BinaryCrossEntropy, SquaredError
from dosimeter.engines.shifts.recover import declared_noise, doubt_of_maps
from dosimeter.engines.shifts.unmixing import ZERO_NOISES, unmix
from dosimeter.engines.subspace.distortion import distortion_of
from dosimeter.engines.subspace.spectrum import rounding_unit
from dosimeter.engines.tokens.span import Span, span_of
from dosimeter.interfaces import Exposure, Public
from dosimeter.linear_fit import linear_fit
from dosimeter.network.head import Head
from dosimeter.randomness import generator
from dosimeter.types import Refused

DEVIATIONS = 8.0  # of an error bar
LARGEST_BAR = 1e-2  # relative error of a certified feature
MIXING = (
    "any invertible mixing of {rank} samples' features, with the inverse on their slopes, has the same gradient at the head; "
    "only features with many zeros, as behind a ReLU, or a batch of one fix it"
)


@dataclass(frozen=True, kw_only=True)
class HeadFactors:
    """Features and slopes, in no particular order: slopesᵀ features = ∇W, and the slopes sum to ∇b."""

    features: Tensor  # (n, H)
    slopes: Tensor  # (n, C) of the mean loss over the batch
    error_bar: Tensor  # (n,) relative, of features and of the slopes' scale
    slope_error: Tensor  # (n,) by which an entry of the slopes may be off besides
    certified: Tensor  # (n,) bool
    doubt: str  # why nothing is certified, "" where something is


def take_apart(exposure: Exposure, head: Head, seed: int = 0) -> HeadFactors:
    """The factors of the head's gradient; refused where it leaves them undetermined."""
    public = exposure.public
    assert head.weight_gradient is not None
    if head.bias_gradient is None:
        raise Refused("the scale of a feature is told by the gradient of the head's bias, which was not sent")
    unit = rounding_unit(head.weight_gradient)
    span = span_of(head.weight_gradient, unit, declared=declared_noise(head.weight_gradient, public))
    if span.rank == 0:
        raise Refused("no direction of the head's gradient stands above its noise")
    sums_to_zero = not isinstance(public.loss, SquaredError | BinaryCrossEntropy)  # slopes, as under any loss over a softmax
    most = min(head.classes - sums_to_zero, head.features)
    if public.batch_size is None and span.rank >= most:
        raise Refused(f"the head's gradient has full rank, {span.rank}: any larger batch looks like this, and no batch size is declared")
    if span.rank == 1 and public.batch_size in (None, 1):
        factors = _one_sample(head, span)
    elif not head.non_negative:
        raise Refused(MIXING.format(rank=public.batch_size or span.rank))
    else:
        factors = _several(head, span, seed)
    doubt = doubt_of_maps(public) or _doubt_of_size(public.batch_size, span.rank) or _doubt_of_entries(head.weight_gradient, public)
    certified = factors.certified & (factors.error_bar < LARGEST_BAR) & (not doubt)
    return HeadFactors(
        features=factors.features,
        slopes=factors.slopes,
        error_bar=factors.error_bar,
        slope_error=factors.slope_error,
        certified=certified,
        doubt=factors.doubt or doubt,
    )


def _doubt_of_size(declared: int | None, rank: int) -> str:
    if declared is None or declared == rank:
        return ""
    return f"guesses only: the head's gradient shows {rank} directions and the batch has {declared} samples, so that one may be a mixture"


def _doubt_of_entries(gradient: Tensor, public: Public) -> str:
    """Error bars take every entry to be as wrong as the others."""
    known = distortion_of(gradient, public)
    if known is None or bool(known.live.all()) or not bool(known.live.any()):
        return ""
    return "guesses only: a defense emptied some entries of the head's gradient and kept others, and no bar here holds such errors"


def _one_sample(head: Head, span: Span) -> HeadFactors:
    """f = ∇Wᵀ∇b / ‖∇b‖², the least-squares quotient over all outputs."""
    assert head.weight_gradient is not None
    assert head.bias_gradient is not None
    gradient, slopes = head.weight_gradient.double(), head.bias_gradient.double()
    size = float(slopes.norm())
    if size == 0:
        raise Refused("the gradient of the head's bias is zero, so that it tells no scale")
    feature = gradient.T @ slopes / size**2
    misfit = float((gradient - torch.outer(slopes, feature)).norm())
    noise = max(span.noise, span.unit * float(gradient.square().mean().sqrt()))
    bar = DEVIATIONS * (noise * math.sqrt(len(feature)) / size + span.unit * float(feature.norm())) / float(feature.norm())
    fits = misfit <= DEVIATIONS * (noise * math.sqrt(gradient.numel()) + span.unit * size * float(feature.norm()))
    return HeadFactors(
        features=feature[None],
        slopes=slopes[None],
        error_bar=torch.tensor([bar], dtype=torch.float64, device=feature.device),
        slope_error=torch.tensor([DEVIATIONS * noise], dtype=torch.float64, device=feature.device),
        certified=torch.tensor([fits], device=feature.device),
        doubt="" if fits else f"guesses only: weight and bias of the head disagree by {misfit / float(gradient.norm()):.2g}",
    )


def _several(head: Head, span: Span, seed: int) -> HeadFactors:
    """The edges of the cone of non-negative mixtures, scaled such that their slopes sum to the bias's gradient."""
    assert head.weight_gradient is not None
    assert head.bias_gradient is not None
    gradient, bias = head.weight_gradient.double(), head.bias_gradient.double()
    mixtures = span.values[:, None] * span.right  # (r, H)
    noise = torch.randn(mixtures.shape, generator=generator(seed, "head noise"), dtype=torch.float64).to(mixtures)
    samples = unmix(mixtures, span.noise * noise, seed)
    if len(samples.mixing) < span.rank:
        raise Refused(
            f"{len(samples.mixing)} of {span.rank} samples come out of the mixture: the features have too few zeros for the others, and "
            + MIXING.format(rank=span.rank)
        )
    directions = samples.mixing @ mixtures  # (r, H)
    floor = ZERO_NOISES * span.noise * samples.mixing.norm(dim=1, keepdim=True)
    directions = torch.where(directions > floor, directions, 0)
    slopes = linear_fit(directions.T, gradient.T)  # (r, C)
    inverse = linear_fit(slopes.T, bias[:, None])[:, 0]  # (r,) one over each scale
    if not bool((inverse > 0).all()):
        raise Refused("the gradient of the head's bias fits no positive scale of the features: its entries may have been changed")
    rest = float((slopes.T @ inverse - bias).norm() / bias.norm())
    inverse_of_directions = torch.linalg.pinv(directions.T)  # (r, H)
    lost = DEVIATIONS * span.noise * float(torch.linalg.matrix_norm(inverse_of_directions, 2)) * math.sqrt(bias.numel())
    scale_error = (lost + span.unit * float(bias.norm())) * torch.linalg.pinv(slopes.T).norm(dim=1)  # (r,)
    bars = torch.hypot(DEVIATIONS * samples.errors.to(inverse), scale_error * inverse.max() / inverse)
    fits = rest <= max(LARGEST_BAR, 0) and len(bias) >= span.rank
    return HeadFactors(
        features=directions / inverse[:, None],
        slopes=slopes * inverse[:, None],
        error_bar=bars,
        slope_error=DEVIATIONS * span.noise * inverse_of_directions.norm(dim=1) * inverse,
        certified=samples.certain.to(bars.device) & fits,
        doubt="" if fits else f"guesses only: the slopes miss the bias's gradient by {rest:.2g}",
    )
