"""One estimate of each sample: the maps of one layer lead to those of all layers behind it, to the feature and to the label.

The model behind a layer carries its maps on. Every layer on the way has a gradient of its own, which shifts of its inputs must explain:
G = Σ_o D_oᵀ A with some slopes D. At the head, G = Δᵀ F gives the slopes Δ at the logits, which softmax and the label explain. A mixture
of samples, or two samples in each other's place, explains none of this.
A layer inside a residual block does not lead on by itself. Its samples are paired with those of the layer behind the block. Where the
block's rectifier is closed, no slope comes back through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.engines.shifts.scales import shifted_maps, slopes_of
from dosimeter.interfaces import Exposure
from dosimeter.linear_fit import linear_fit
from dosimeter.network.head import Head, find_head
from dosimeter.network.tail import Tail, find_tail
from dosimeter.types import JoinedSamples, Refused

SPARE = 1.5  # entries of a layer's input over its positions, from which on its gradient can refute the maps
LARGEST_LABEL_MISFIT = 1e-2  # of the slopes at the logits
LARGEST_PAIRED, LEAST_UNPAIRED = 1e-2, 10.0  # what is left of the closed slopes in a pair, relative; and over that, in any other pair


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """A layer that no shortcut leads past, and what follows from its maps."""

    layer: ConvolutionLayer
    tail: Tail
    head: Head


def find_trunk(exposure: Exposure, layer: ConvolutionLayer, samples: int) -> Trunk | None:
    """The way from a layer to the head; None where there is none, or where the head or its gradient is missing."""
    probes = torch.zeros(samples, *exposure.public.input_shape).to(next(exposure.model.parameters()))
    few = 2 if exposure.model.training else 1  # they tell whether there is a way at all
    if find_tail(exposure.model, layer.name, layer.name, probes[:few]) is None:
        return None
    try:
        head = find_head(exposure)
    except Refused:
        return None
    tail = None if head.weight_gradient is None else find_tail(exposure.model, layer.name, head.name, probes)
    return None if tail is None else Trunk(layer=layer, tail=tail, head=head)


def join(trunk: Trunk, maps: Tensor, behind: Sequence[ConvolutionLayer]) -> JoinedSamples:
    """(B, C, H, W) maps of the trunk's layer -> what follows of each sample. `behind` are layers that may stand on the way."""
    received = maps.double() if trunk.layer.module.weight.ndim == 4 else maps.double().flatten(1)
    features = trunk.tail(received)
    others: dict[str, Tensor] = {}
    misfits: dict[str, float] = {}
    for layer in behind:
        given = replace(trunk.tail, wanted=layer.name).replay(received).received
        if given is None or given[0].numel() != layer.positions * layer.weight.shape[1]:
            continue
        others[layer.name] = given.reshape(len(maps), -1, layer.height, layer.width)
        misfit = _misfit(layer, others[layer.name])
        if misfit is not None:
            misfits[layer.name] = misfit
    assert trunk.head.weight_gradient is not None
    gradient = trunk.head.weight_gradient.to(features)
    slopes = linear_fit(features.T, gradient.T)  # Δ (B, C)
    misfits[trunk.head.name] = float((slopes.T @ features - gradient).norm() / gradient.norm())
    return JoinedSamples(maps=others, features=features, labels=_labels(trunk.head, features, slopes), misfits=misfits)


def _misfit(layer: ConvolutionLayer, maps: Tensor) -> float | None:
    """How far shifts of the maps are from explaining the layer's gradient; None where any maps would."""
    area = len(maps) * (layer.positions if layer.module.weight.ndim == 2 else math.prod(_output_grid(layer)))
    if layer.obstacle.startswith("the layer runs") or getattr(layer.module, "groups", 1) > 1 or area * SPARE > layer.weight[0].numel():
        return None
    flat = maps.flatten(2).transpose(1, 2)  # (B, H·W, in)
    shifted = shifted_maps(layer, flat)
    wanted = layer.gradient.to(flat).permute(2, 3, 1, 0).flatten(0, 2)
    return float((shifted.T @ slopes_of(layer, flat).flatten(0, 1) - wanted).norm() / wanted.norm())


def _output_grid(layer: ConvolutionLayer) -> tuple[int, int]:
    return layer.reads.output_height, layer.reads.output_width


def _labels(head: Head, features: Tensor, slopes: Tensor) -> Tensor | None:
    """Cross-entropy's slopes are κ (softmax − label), with one κ for the batch; None where they are not."""
    labels = slopes.argmin(1)
    expected = head.logits(features).softmax(1) - nn.functional.one_hot(labels, head.classes).to(slopes)
    factor = float((slopes * expected).sum() / expected.square().sum())
    off = (slopes - factor * expected).norm(dim=1) / slopes.norm(dim=1).clamp_min(torch.finfo(slopes.dtype).tiny)
    return labels if bool((off < LARGEST_LABEL_MISFIT).all()) else None


def pair(layer: ConvolutionLayer, maps: Tensor, slopes: Tensor, behind: Tensor) -> Tensor | None:
    """For each sample at the end of a residual block, its index at the layer behind the block: (B,); None where they do not tell.

    `slopes` (B, out, H, W) stand behind the layer, whose output a norm and a sum lead to the rectifier that gives `behind` (B, out, H, W).
    Where `behind` is zero the slope is zero, or, behind a norm in train mode, a constant and a multiple of the layer's output for each
    channel. What these two leave of the slopes there is zero for the sample itself.
    """
    if slopes.shape != behind.shape or not isinstance(layer.module, nn.Conv2d):
        return None
    weight = layer.module.weight.detach().double()
    output = layer.module._conv_forward(maps.double(), weight, None).flatten(2)  # (B, out, H·W)
    slopes, closed = slopes.flatten(2), (behind <= 0).flatten(2)
    left = torch.stack([_left_over(slopes, output, one[None].expand_as(slopes)) for one in closed], 1)  # (B, B)
    order = torch.from_numpy(linear_sum_assignment(left.cpu().numpy())[1]).to(left.device)
    own = left.gather(1, order[:, None])[:, 0]
    rest = left.scatter(1, order[:, None], torch.inf).amin(1) if len(left) > 1 else torch.full_like(own, torch.inf)
    return order if bool((own < LARGEST_PAIRED).all()) and bool((rest > LEAST_UNPAIRED * own).all()) else None


def _left_over(slopes: Tensor, output: Tensor, closed: Tensor) -> Tensor:
    """What a constant and a multiple of the output for each channel leave of the slopes where the rectifier is closed: (B,)."""
    count = closed.sum(2, keepdim=True).clamp_min(1)

    def centred(values: Tensor) -> Tensor:
        return (values - (values * closed).sum(2, keepdim=True) / count) * closed

    slope, out = centred(slopes), centred(output)
    multiple = (slope * out).sum(2, keepdim=True) / out.square().sum(2, keepdim=True).clamp_min(torch.finfo(out.dtype).tiny)
    return (slope - multiple * out).flatten(1).norm(dim=1) / slopes.flatten(1).norm(dim=1)
