"""Fully-connected networks inverted layer by layer, with or without bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.needs import why_not_sent
from dosimeter.engines.premises import premises_of
from dosimeter.engines.recursion.feature_scale import scale_feature
from dosimeter.engines.recursion.lone_samples import FirstRows, doubt_of_quotients, read_lone_samples
from dosimeter.engines.recursion.scale_choice import choose_scale, given_label
from dosimeter.engines.scalar.verdict import doubt_of
from dosimeter.interfaces import Attack, Exposure
from dosimeter.network.chain import Link, find_chain, walk_back
from dosimeter.network.first_layer import find_first_layers
from dosimeter.network.head import Head, find_head
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction, Refused

FITTING_MISFIT = 1e-3  # root mean square up to which a label has its form, and rows show one input


@ATTACKS.register("linear_recursion")
@dataclass(frozen=True, kw_only=True)
class LinearRecursion(Attack):
    """Walks one sample back through a fully-connected network, from the head's error to the input, with or without biases.

    Wang, Liang and He, "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Section 4.2, Eqs.
    (6)-(7), from the feature of Eqs. (2)-(5). With a bias, first-layer quotients ∇W_l / ∇b_l are inputs (Aono et al., IEEE TIFS 2018),
    in batches for neurons that one sample fires (Pan et al., USENIX Security 2022).
    Departures: Eq. (7) uses every row, by least squares. A soft label's form fixes the scale. Inputs must reproduce the feature, then
    lie in the data range. Several such scales, or two classes without label, are ambiguous. In batches a quotient is claimed only with a
    proof (`read_lone_samples`). Without bias, secure aggregation is refused.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset()  # the first layer's gradient, or that of every layer

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        rows = _first_rows(exposure)
        if rows is not None:
            return (
                _reconstruct_one_sample(exposure, rows, labels)
                if exposure.public.batch_size == 1
                else read_lone_samples(exposure, rows, labels)
            )
        head = find_head(exposure)
        links = find_chain(exposure.model, exposure.public.input_shape, head.name)
        if exposure.public.batch_size != 1:
            size = exposure.public.batch_size
            raise Refused(f"linear_recursion without a bias gradient needs a batch of one; this one has {size or 'an unknown number'}")
        if not exposure.public.loss.shift_invariant:
            raise Refused(
                f"linear_recursion needs softmax cross-entropy, which ties the feature to the label; this is {exposure.public.loss.name}"
            )
        absent = [link for link in links if link.key not in exposure.update]
        if absent:
            why = why_not_sent(exposure, absent[0].key, repr(absent[0].name))
            raise Refused(f"linear_recursion needs the gradient of every layer: {why}")
        return _recurse(exposure, head, links, labels)


def _first_rows(exposure: Exposure) -> FirstRows | None:
    """The layers that take the raw input and have a bias; None if the client sent nothing of them."""
    pairs = find_first_layers(exposure.model, exposure.public.input_shape)
    update = exposure.update
    sent = [(weight, bias) for weight, bias in pairs if {weight, bias} <= update.keys() and bool(update[bias].any())]
    return FirstRows(weights=[weight for weight, _ in sent], biases=[bias for _, bias in sent]) if sent else None


def _reconstruct_one_sample(exposure: Exposure, first: FirstRows, labels: LabelEstimate | None) -> Reconstruction:
    """The least-squares quotient over all rows. Single entries that are exactly zero were withheld and do not count."""
    weight, bias = first.gradients(exposure)
    gradient, error = weight.double(), bias.double()[:, None]
    there = gradient != 0
    inputs = (gradient * error).sum(0) / (error.square() * there).sum(0).clamp_min(torch.finfo(torch.float64).tiny)  # (d,)
    misfit = float(((gradient - error * inputs) * there).norm() / gradient.norm().clamp_min(1e-300))
    known = torch.tensor([-1], device=weight.device)
    doubt = "" if misfit <= FITTING_MISFIT else f"the rows of the first layer disagree by {misfit:.2g}: {_WHY_ROWS_DISAGREE}"
    doubt = doubt or doubt_of_quotients(exposure, first)
    return Reconstruction(
        inputs=inputs.reshape(1, *exposure.public.input_shape).to(weight),
        labels=labels.labels.to(weight.device) if labels is not None and len(labels.labels) == 1 else known,
        objective=misfit,
        normalization=exposure.public.normalization,
        outcome=Outcome.AMBIGUOUS if doubt else Outcome.COMPLETED,
        message=doubt,
        premises=() if doubt else premises_of(exposure.public),
    )


_WHY_ROWS_DISAGREE = "the update was changed or rounded, or the batch has more than one sample"


def _recurse(exposure: Exposure, head: Head, links: list[Link], labels: LabelEstimate | None) -> Reconstruction:
    assert head.weight_gradient is not None
    if not bool(head.weight_gradient.any()):
        return exposure.without_inputs(
            Outcome.SINGULAR, "the last layer's gradient is zero: the sample has no feature, or is classified without error"
        )
    known = None if labels is None else given_label(labels, head.classes)
    if head.bias_gradient is not None and bool(head.bias_gradient.any()):
        inputs, label, misfit, rivals, changed = _walk(exposure, links, head.bias_gradient.double()), None, 0.0, 0, ""
    else:
        scaled = scale_feature(head.weight_gradient, head.weight, head.bias, head.non_negative, known)
        walked = torch.cat([_walk(exposure, links, one.error) for one in scaled])  # (n, *shape)
        chosen, rivals = choose_scale(exposure, head, walked, scaled)
        inputs, best = walked[chosen : chosen + 1], scaled[chosen]
        label, misfit, changed = best.label, best.misfit, doubt_of(exposure.public)
    if not bool(torch.isfinite(inputs).all()):
        return exposure.without_inputs(Outcome.SINGULAR, "a layer passed no gradient back: every neuron before it is dead")
    message = _doubts(misfit, rivals, changed, assumed=label is not None and known is None and head.classes == 2)
    settled = torch.zeros(1, dtype=torch.int64, device=inputs.device) - 1 if label is None else label[None]
    return Reconstruction(
        inputs=inputs.to(head.weight_gradient),
        labels=settled if known is None else known[None],
        objective=misfit,
        normalization=exposure.public.normalization,
        outcome=Outcome.AMBIGUOUS if message else Outcome.COMPLETED,
        message=message,
        premises=() if message else premises_of(exposure.public),
    )


def _walk(exposure: Exposure, links: list[Link], error: Tensor) -> Tensor:
    return walk_back(links, exposure.update, error).reshape(1, *exposure.public.input_shape)


def _doubts(misfit: float, rivals: int, changed: str, *, assumed: bool) -> str:
    """Why the scale of the input is in doubt; empty if it is not."""
    doubts = [f"the label misses its form by {misfit:.2g}, so that the scale of the input is a guess"] if misfit > FITTING_MISFIT else []
    if changed:
        doubts.append(f"the scale of the input is {changed}")
    if assumed:
        doubts.append(
            "with two classes every scale of the input has a soft label that explains the gradient; this one takes it for a hard one"
        )
    if rivals:
        doubts.append(f"{rivals} other scale{'s' * (rivals > 1)} of the input explain{'s' * (rivals == 1)} the gradient as well")
    return "; ".join(doubts)
