"""The samples that the head's gradient shows under losses other than plain cross-entropy: features, and the labels that slopes tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from dosimeter.client.losses import BinaryCrossEntropy, OwnLoss
from dosimeter.engines.head_slopes.factors import HeadFactors, take_apart
from dosimeter.engines.head_slopes.label_vectors import Head64, find_label_vectors
from dosimeter.engines.head_slopes.own_loss import class_by_slope, expected_of_softmax, loss_at_logits, vectors_by_slopes
from dosimeter.engines.shifts.recover import declared_noise, doubt_of_maps
from dosimeter.engines.subspace.problem import may_be_scaled
from dosimeter.engines.subspace.spectrum import rounding_unit
from dosimeter.interfaces import Exposure
from dosimeter.network.head import CLOSINGS, Head
from dosimeter.types import Refused

MIRRORED = (
    "guesses only: under a head without biases a sample's mirror image, −f with every label exchanged, has the same gradient; "
    "the gradient of the bias, or features that are never negative, would tell"
)
BINARY_SLACK = 0.05  # by which a recovered label may miss 0 or 1, beside its error bar


@dataclass(frozen=True, kw_only=True)
class HeadSamples:
    """Samples in no particular order, each once."""

    features: Tensor  # (n, H)
    vectors: Tensor | None  # (n, C) of zeros and ones, where samples have several labels
    labels: Tensor  # (n,) int64; −1 where the slopes tell none
    times: Tensor  # (n,) int64, how often each occurs
    error_bar: Tensor  # (n,) relative
    certified: Tensor  # (n,) bool: the feature, and the label where there is one
    complete: bool  # every direction of the gradient is a certified sample
    size: int | None  # of the batch
    message: str


def separate(exposure: Exposure, head: Head, rng: Generator, seed: int = 0) -> HeadSamples:
    """Every sample of the head's gradient that can be told, with its labels; refused where none can."""
    if not isinstance(loss_at_logits(exposure.public.loss, head), BinaryCrossEntropy):
        return _by_factors(exposure, head, seed)
    reason = ""
    if head.classes > 2 and exposure.public.batch_size != 1:
        found = _by_vectors(exposure, head, rng)
        if len(found.features):
            return found
        reason = found.message
    try:
        return _by_factors(exposure, head, seed)
    except Refused as refusal:
        raise Refused(f"{reason}; {refusal}" if reason else str(refusal)) from None


def _by_vectors(exposure: Exposure, head: Head, rng: Generator) -> HeadSamples:
    public, gradient = exposure.public, head.weight_gradient
    assert gradient is not None
    loss = loss_at_logits(public.loss, head)
    assert isinstance(loss, BinaryCrossEntropy)
    weight = head.weight.double()
    equations = Head64(
        gradient=gradient.double(),
        weight=weight,
        bias=weight.new_zeros(len(weight)) if head.bias is None else head.bias.double(),
        unit=rounding_unit(gradient),
        noise=declared_noise(gradient, public),
        scale=head.classes if loss.over_classes == "mean" else 1,
        model_unit=head.precision,
        bias_gradient=None if head.bias_gradient is None else head.bias_gradient.double(),
        bias_noise=0.0 if head.bias_gradient is None else declared_noise(head.bias_gradient, public),
        non_negative=head.non_negative,
    )
    known = None if may_be_scaled(public) else public.batch_size
    found = find_label_vectors(equations, known, rng)
    times = found.times if known is not None else torch.ones_like(found.times)  # shares are of an unknown whole
    doubt = doubt_of_maps(public) or _doubt_of_count(int(times.sum()), public.batch_size)
    device, count = gradient.device, len(found.features)
    declared = public.batch_size
    oriented = found.oriented.to(device)
    complete = found.complete and not doubt and declared in (None, int(times.sum())) and bool(oriented.all())
    at_most = (head.classes - 1) // 2
    why = f"more than {at_most} samples leave the equations of {head.classes} labels undetermined" if found.rank > at_most else ""
    left = MIRRORED if not bool(oriented.all()) else f"{count} of {found.rank} directions of the gradient are certified samples"
    return HeadSamples(
        features=found.features,
        vectors=found.vectors,
        labels=found.vectors.argmax(1),
        times=times.to(device),
        error_bar=found.error_bar.to(device),
        certified=oriented & (not doubt),
        complete=complete,
        size=declared or found.samples,
        message=doubt or why or ("" if complete else left),
    )


def _doubt_of_count(count: int, declared: int | None) -> str:
    if declared is None or count <= declared:
        return ""
    return f"guesses only: the shares of the gradient are those of {count} samples, more than the declared {declared}: a premise is wrong"


def _by_factors(exposure: Exposure, head: Head, seed: int) -> HeadSamples:
    public, factors = exposure.public, take_apart(exposure, head, seed)
    size = public.batch_size or len(factors.features)
    vectors, labels, fits, why = _labels(exposure, head, factors, size)
    certified = factors.certified & fits
    complete = bool(certified.all()) and len(certified) == size
    return HeadSamples(
        features=factors.features,
        vectors=vectors,
        labels=labels,
        times=torch.ones_like(labels),
        error_bar=factors.error_bar,
        certified=certified,
        complete=complete,
        size=size,
        message=factors.doubt or why,
    )


def _labels(exposure: Exposure, head: Head, factors: HeadFactors, size: int) -> tuple[Tensor | None, Tensor, Tensor, str]:
    """Label vectors, labels, whether each fits its slope, and why there are none."""
    public, loss = exposure.public, loss_at_logits(exposure.public.loss, head)
    closing = CLOSINGS.get(head.closing, nn.Identity())
    logits, none = head.logits(factors.features), torch.full_like(factors.certified, -1, dtype=torch.int64)
    if isinstance(loss, BinaryCrossEntropy) and not may_be_scaled(public):
        scale = size * (head.classes if loss.over_classes == "mean" else 1)
        values = torch.sigmoid(logits) - scale * factors.slopes
        vectors = values.round().clamp(0, 1)
        off = (values - vectors).abs().amax(1) <= BINARY_SLACK
        return vectors, vectors.argmax(1) if head.classes > 1 else vectors[:, 0].long(), off, ""
    own, sent = isinstance(loss, OwnLoss), head.weight.dtype  # the client's loss may hold weights in the model's format
    if isinstance(loss, OwnLoss) and loss.target_kind() == "labels":
        told = vectors_by_slopes(loss, closing, logits.to(sent), factors.slopes, factors.error_bar)
        if told is not None:
            vectors, fits = told
            labels = torch.where(fits, vectors.argmax(1) if head.classes > 1 else vectors[:, 0].long(), -1)
            why = "" if bool(fits.all()) else "the slopes are those of no label vector of zeros and ones"
            return vectors, labels, torch.ones_like(fits), why
    if loss.target_kind() == "classes" and head.classes > 1:
        labels = class_by_slope(loss, closing, logits.to(sent), factors.slopes, factors.error_bar) if isinstance(loss, OwnLoss) else None
        if labels is None and not head.closing:
            labels = expected_of_softmax(logits, factors.slopes, factors.error_bar)
        labels = none if labels is None else labels
        kind = "under the client's loss" if own else "of a weighted softmax"
        why = "" if bool((labels >= 0).all()) else f"the slopes are not those {kind}, so that they name no class"
        return None, labels, torch.ones_like(factors.certified), why
    return None, none, torch.ones_like(factors.certified), ""
