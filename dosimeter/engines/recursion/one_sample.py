"""One sample's input from the gradients of a plain network: the head's error in closed form, then layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dosimeter.client.losses import BinaryCrossEntropy
from dosimeter.engines.needs import why_not_sent
from dosimeter.engines.recursion.feature_scale import ScaledFeature, scale_binary_feature, scale_feature
from dosimeter.engines.recursion.layer_equations import Solution
from dosimeter.engines.recursion.plain_walk import LayerRank, Step, Walk, walk_plain
from dosimeter.engines.recursion.scale_choice import choose_scale, given_label
from dosimeter.engines.scalar.verdict import doubt_of
from dosimeter.interfaces import Exposure
from dosimeter.network.chain import Link, find_chain
from dosimeter.network.head import Head, find_head
from dosimeter.types import LabelEstimate, Outcome, Reconstruction, Refused

MOST_UNKNOWNS = 8192  # of one layer: its equations are a dense matrix
LARGEST_MISFIT = 1e-3  # of the gradient that the recovered input gives, relative


def reconstruct_one(
    exposure: Exposure, labels: LabelEstimate | None, method: str, solve_layer: Callable[[Step], Solution]
) -> Reconstruction:
    """The only sample of a batch of one. Every scale of the head's error is walked back; the server's own checks choose among them."""
    head = find_head(exposure)
    links = find_chain(exposure.model, exposure.public.input_shape, head.name, method=method, convolutions=True)
    _check(exposure, links, method)
    assert head.weight_gradient is not None
    if not bool(head.weight_gradient.any()):
        return exposure.without_inputs(
            Outcome.SINGULAR, "the last layer's gradient is zero: the sample has no feature, or is classified without error"
        )
    scaled = _scales(exposure, head, labels, method)
    if not scaled:
        return exposure.without_inputs(Outcome.SINGULAR, "no logit has the product with its slope that the head's gradient shows")
    walks = [walk_plain(links, exposure.update, one.error, solve_layer) for one in scaled]
    inputs = torch.stack([walk.inputs.reshape(exposure.public.input_shape) for walk in walks])  # (n, *shape)
    if not bool(torch.isfinite(inputs).all()):
        return exposure.without_inputs(Outcome.SINGULAR, "a layer passed no gradient back: every neuron before it is dead")
    chosen, rivals = choose_scale(exposure, head, inputs, scaled)
    return _described(exposure, inputs[chosen], scaled[chosen], walks[chosen], rivals)


def _check(exposure: Exposure, links: Sequence[Link], method: str) -> None:
    for link in links:
        if link.key not in exposure.update:
            raise Refused(f"{method} needs the gradient of every layer, and {why_not_sent(exposure, link.key, repr(link.name))}")
        if not isinstance(link.module, nn.Conv2d):
            continue
        if link.module.groups > 1:
            raise Refused(f"{method} solves convolutions without groups; {link.name!r} has {link.module.groups}")
        unknowns = link.shape[0] * link.shape[1] * link.shape[2]
        if unknowns > MOST_UNKNOWNS:
            raise Refused(f"{method} solves at most {MOST_UNKNOWNS:,} unknowns a layer; the input of {link.name!r} has {unknowns:,}")


def _scales(exposure: Exposure, head: Head, labels: LabelEstimate | None, method: str) -> list[ScaledFeature]:
    """The slopes of the loss at the logits: the bias gradient where there is one, else every scale that the loss allows."""
    gradient, loss = head.weight_gradient, exposure.public.loss
    assert gradient is not None
    if head.bias_gradient is not None and bool(head.bias_gradient.any()):
        error = head.bias_gradient.double()
        feature = gradient.double().T @ error / error.square().sum()
        return [ScaledFeature(feature=feature, error=error, label=_label_of(head, feature, error), misfit=0.0)]
    if loss.shift_invariant:
        known = None if labels is None else given_label(labels, head.classes)
        return scale_feature(gradient, head.weight, head.bias, head.non_negative, known)
    if isinstance(loss, BinaryCrossEntropy) and head.classes == 1:
        known = None if labels is None else float(labels.labels.flatten()[0])
        return scale_binary_feature(gradient, head.weight, head.bias, head.non_negative, known)
    raise Refused(
        f"{method} without the head's bias gradient needs softmax cross-entropy, or one logit with sigmoid cross-entropy; "
        f"this is {loss.name} with {head.classes} logits"
    )


def _label_of(head: Head, feature: Tensor, error: Tensor) -> Tensor:
    """y = p − ∂L/∂z of cross-entropy: (C,)."""
    logits = head.logits(feature)
    return (torch.sigmoid(logits) if head.classes == 1 else logits.softmax(0)) - error


def _described(exposure: Exposure, inputs: Tensor, scaled: ScaledFeature, walk: Walk, rivals: int) -> Reconstruction:
    settled = scaled.label.round().long() if len(scaled.label) == 1 else scaled.label[None]
    misfit = _misfit(exposure, inputs, settled)
    doubts = [rank_words(one) for one in walk.ranks if one.missing]
    if misfit > LARGEST_MISFIT:
        doubts.append(f"the gradient of this input is {misfit:.2g} off the client's")
    if rivals:
        doubts.append(f"{rivals} other scale{'s' * (rivals > 1)} of the input explain{'s' * (rivals == 1)} the gradient as well")
    if changed := doubt_of(exposure.public):
        doubts.append(changed)
    outcome = Outcome.AMBIGUOUS if rivals else Outcome.PARTIAL if doubts else Outcome.COMPLETED
    return Reconstruction(
        inputs=inputs[None].to(next(exposure.model.parameters())),
        labels=settled,
        objective=misfit,
        normalization=exposure.public.normalization,
        outcome=outcome,
        message="; ".join(doubts),
    )


def rank_words(one: LayerRank) -> str:
    """R-GAP's rank analysis of one layer, as a sentence."""
    return f"{one.name}: {one.rank:,} of its input's {one.unknowns:,} unknowns are determined"


def _misfit(exposure: Exposure, inputs: Tensor, label: Tensor) -> float:
    """How far the gradient of the recovered input is from the client's, relative."""
    like = next(exposure.model.parameters())
    own = exposure.public.training(exposure.model, inputs[None].to(like), label, exposure.public.loss)
    names = [name for name in own if name in exposure.update]
    off = sum(float((own[name] - exposure.update[name]).double().square().sum()) for name in names)
    size = sum(float(exposure.update[name].double().square().sum()) for name in names)
    return (off / size) ** 0.5 if size else 0.0
