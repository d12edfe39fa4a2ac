"""A linear layer's gradient as a product of slopes and inputs, Dᵀ X, up to one mixing of the samples; and the scale that the bias gives.

G = L R with L (out, B) and R (B, in). A mixing Q (B, B) makes Dᵀ = L Q and X = Q⁻¹ R. Methods that find the directions of Q's columns, or
of Q⁻¹'s rows, share what stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.engines.shifts.convolutions import ConvolutionLayer, find_convolutions
from dosimeter.engines.shifts.layout import NoLayout, Rank, read_rank
from dosimeter.engines.shifts.recover import declared_noise
from dosimeter.engines.subspace.spectrum import rounding_unit
from dosimeter.interfaces import Exposure
from dosimeter.linear_fit import linear_fit
from dosimeter.types import MapEstimate, MapLayer, Outcome, Refused


@dataclass(frozen=True, kw_only=True)
class LinearRows:
    """The two factors of one linear layer's gradient, in float64."""

    layer: ConvolutionLayer
    left: Tensor  # (out, B) orthonormal columns
    right: Tensor  # (B, in)
    bias_gradient: Tensor  # (out,)
    rank: Rank

    @property
    def samples(self) -> int:
        return len(self.right)


def read_rows(exposure: Exposure, name: str | None, method: str) -> LinearRows:
    """The layer `name`, or the first linear layer whose gradient shows a number of samples; refused where there is none."""
    layers = [one for one in find_convolutions(exposure) if isinstance(one.module, nn.Linear) and one.positions == 1]
    chosen = [one for one in layers if name in (None, one.name)]
    if not chosen:
        there = f"there are: {', '.join(one.name for one in layers)}" if layers else "the update has none"
        raise Refused(f"{method} needs the gradient of a hidden linear layer{'' if name is None else f' {name!r}'}; {there}")
    reasons = []
    for layer in chosen:
        bias = exposure.update.get(f"{layer.name}.bias" if layer.name else "bias")
        if bias is None:
            reasons.append(f"{layer.name}: no bias gradient was sent, which tells the scale")
            continue
        gradient = layer.gradient.double().flatten(1)
        try:
            noise, unit = declared_noise(layer.gradient, exposure.public), rounding_unit(layer.gradient)
            rank = read_rank(layer.gradient, layer.reads, unit=unit, noise=noise, batch_size=exposure.public.batch_size)
        except NoLayout as refusal:
            reasons.append(f"{layer.name}: {refusal}")
            continue
        left, values, right = torch.linalg.svd(gradient, full_matrices=False)
        kept = rank.positions
        right = values[:kept, None] * right[:kept]
        return LinearRows(layer=layer, left=left[:, :kept], right=right, bias_gradient=bias.double(), rank=rank)
    raise Refused(f"{method} finds no layer to take apart. {'; '.join(reasons)}")


def scaled_inputs(rows: LinearRows, mixing: Tensor) -> Tensor:
    """The inputs (B, in) whose slopes have the directions L Q, scaled such that they sum to the bias gradient."""
    slopes = rows.left @ mixing  # (out, B)
    factors = linear_fit(slopes, rows.bias_gradient[:, None])[:, 0]
    return torch.linalg.solve(mixing * factors, rows.right)


def as_estimate(rows: LinearRows, inputs: Tensor, message: str) -> MapEstimate:
    """A published method's inputs as maps of one position. Nothing is certified."""
    layer, count = rows.layer, len(inputs)
    tried: Sequence[MapLayer] = [
        MapLayer(
            name=layer.name,
            positions=1,
            most_samples=layer.most_samples,
            certified=0,
            reason="",
            channels=layer.channels,
            seen=rows.rank.positions,
            gap=rows.rank.gap,
        )
    ]
    return MapEstimate(
        maps=inputs[:, :, None, None],
        layer=layer.name,
        layers=tuple(tried),
        batch_size=rows.samples,
        certified=torch.zeros(count, dtype=torch.bool, device=inputs.device),
        error_bars=torch.full((count,), torch.nan, dtype=torch.float64, device=inputs.device),
        outcome=Outcome.PARTIAL,
        message=message,
    )
