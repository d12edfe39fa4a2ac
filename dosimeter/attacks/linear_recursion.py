"""Fully-connected networks undone layer by layer, with or without bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.analytic.chain import Link, find_chain, walk_back
from dosimeter.analytic.feature_scale import scale_feature
from dosimeter.analytic.row_quotients import lone_samples
from dosimeter.head import Head, find_head
from dosimeter.interfaces import Attack
from dosimeter.losses import as_distribution
from dosimeter.registry import ATTACKS
from dosimeter.types import Exposure, Knowledge, LabelEstimate, Outcome, Reconstruction, Refused

FITS = 1e-3  # root mean square up to which a label has the form that settled its scale


@ATTACKS.register("linear_recursion")
@dataclass(frozen=True, kw_only=True)
class LinearRecursion(Attack):
    """Walks one sample back through a fully-connected network, from the head's error to the input, bias or none.

    Wang, Liang and He, "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Section 4.2,
    Eqs. (6)-(7), from the feature that Eqs. (2)-(5) recover. Where the first layer has a bias its quotients ∇W_l / ∇b_l are
    the inputs (Aono et al., IEEE TIFS 2018), for a batch too, as far as neurons fire for one sample alone (Pan et al.,
    USENIX Security 2022).
    Departures: every row takes part in Eq. (7), by least squares, instead of one; a soft label need not be known, since its
    form (smoothed, one-hot or a mixture of two) settles the scale; of a batch only quotients that two neurons agree on, or
    that lie on 8-bit levels, are claimed, which mixtures do not. Under secure aggregation without bias it is refused, since the
    clients together are more than one sample.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.HEAD_GRADIENT})

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        head = find_head(exposure)
        links = find_chain(exposure.model, exposure.public.input_shape, head.name)
        first = f"{links[0].name}.bias" if links[0].name else "bias"
        if first in exposure.update and bool(exposure.update[first].any()):
            return _divide_rows(exposure, exposure.update[first.removesuffix("bias") + "weight"], exposure.update[first], labels)
        if exposure.public.batch_size != 1:
            size = exposure.public.batch_size
            raise Refused(f"linear_recursion without a bias gradient needs a batch of one; this one has {size or 'an unknown number'}")
        if not exposure.public.loss.shift_invariant:
            raise Refused(
                f"linear_recursion needs softmax cross-entropy, which ties the feature to the label; this is {exposure.public.loss.name}"
            )
        withheld = [link.name for link in links if f"{link.name}.weight" not in exposure.update]
        if withheld:
            raise Refused(f"linear_recursion needs the gradient of every layer, and the client withholds {withheld[0]!r}")
        return _recurse(exposure, head, links, labels)


def _recurse(exposure: Exposure, head: Head, links: list[Link], labels: LabelEstimate | None) -> Reconstruction:
    assert head.weight_gradient is not None
    known = None if labels is None else _given(labels, head.classes)
    if head.bias_gradient is not None and bool(head.bias_gradient.any()):
        error, label, misfit = head.bias_gradient.double(), None, 0.0
    else:
        scaled = scale_feature(head.weight_gradient, head.weight, head.bias, head.non_negative, known)
        error, label, misfit = scaled.error, scaled.label, scaled.misfit
    inputs = walk_back(links, exposure.update, error).reshape(1, *exposure.public.input_shape)
    settled = torch.zeros(1, dtype=torch.int64, device=inputs.device) - 1 if label is None else label[None]
    message = "" if misfit <= FITS else f"the label misses its form by {misfit:.2g}, so that the scale of the input is a guess"
    sound = bool(torch.isfinite(inputs).all())
    return Reconstruction(
        inputs=inputs.to(head.weight_gradient),
        labels=settled if known is None else known[None],
        objective=misfit,
        normalization=exposure.public.normalization,
        outcome=(Outcome.COMPLETED if misfit <= FITS else Outcome.AMBIGUOUS) if sound else Outcome.SINGULAR,
        message=message if sound else "a layer passed no gradient back: every neuron before it is dead",
    )


def _divide_rows(exposure: Exposure, weight: Tensor, bias: Tensor, labels: LabelEstimate | None) -> Reconstruction:
    public = exposure.public
    quotients, certain = lone_samples(weight, bias, public.input_shape, public.normalization)
    if public.batch_size == 1:
        certain = torch.arange(len(quotients), device=weight.device) == 0  # one sample: every row shows it, the first with least noise
    inputs = quotients[certain].to(weight)
    count = len(inputs)
    known = torch.full((count,), -1, device=weight.device)
    if labels is not None and len(labels.labels) == count == 1:
        known = labels.labels.to(weight.device)
    enough = public.batch_size is not None and count >= public.batch_size
    return Reconstruction(
        inputs=inputs,
        labels=known,
        objective=0.0 if count else torch.inf,
        normalization=public.normalization,
        outcome=Outcome.COMPLETED if enough else Outcome.PARTIAL if count else Outcome.SINGULAR,
        message=f"{count} samples fire a neuron of the first layer alone",
    )


def _given(labels: LabelEstimate, classes: int) -> Tensor:
    rows = labels.labels if labels.soft is None else labels.soft
    return as_distribution(rows, classes, torch.float64)[0]
