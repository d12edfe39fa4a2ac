"""A linear layer before the first layer of a model. Its rows sort inputs into bins by linear functionals."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from dosimeter.network.copies import deep_copy
from dosimeter.normalization import to_pixels
from dosimeter.options import PositiveFloat, mismatch
from dosimeter.randomness import generator
from dosimeter.types import Normalization, Refused

Functional = Literal["brightness", "random", "cosine"]
Moments = dict[str, tuple[float, PositiveFloat]]  # mean and standard deviation, by functional

LAYER_NAMES = ("rows.weight", "rows.bias")  # in an update
LAYER_STRENGTH = 0.01  # factor on the layer's answers: small, so that the model still works
FARTHEST_EDGE = 40.0  # standard deviations beyond which no input lies
# Mean and standard deviation of each functional over natural images in [0, 1]: public knowledge, not the client's data. Brightness and
# cosine are means over the pixels; random functionals have weights of unit norm.
NATURAL_MOMENTS = {"brightness": (0.47, 0.14), "cosine": (0.0, 0.055), "random": (0.0, 0.17)}


class InsertedLayer(nn.Module):
    """Adds the mean answer of `rows` to every entry of the input and passes the sum on to the model.

    All rows feed the same sum, so a sample's derivative δ is the same for every row that it activates. The gradient of row l is
    therefore Σ δ_i x_i over the samples that activate row l.
    """

    def __init__(self, rows: nn.Linear, body: nn.Module, bins: tuple[int, ...], sparse: bool) -> None:
        super().__init__()
        self.rows, self.body = rows, body
        self.bins, self.sparse = bins, sparse  # the number of rows of each functional; whether a row answers inside its own bin alone

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.shift(inputs))

    def shift(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        if flat.shape[1] != self.rows.in_features:
            shape = tuple(inputs.shape[1:])
            raise ValueError(f"input_shape: the layer was inserted for {self.rows.in_features} inputs, got {flat.shape[1]}, shape {shape}")
        answers = self.rows(flat)  # (B, k)
        answers = answers.clamp(0, 1) if self.sparse else answers.relu()
        return inputs + LAYER_STRENGTH * answers.mean(1).reshape(-1, *[1] * (inputs.ndim - 1))


def insert_layer(
    model: nn.Module,
    input_shape: tuple[int, ...],
    functionals: tuple[Functional, ...],
    bins: int,
    *,
    sparse: bool,
    normalization: Normalization | None,
    moments: Moments | None,
    round_number: int,
) -> InsertedLayer:
    """A copy of the model behind a layer whose rows split each functional's range into equally likely bins.

    `moments` are those of the client's kind of data, if an earlier round recovered some; the default is those of natural images.
    """
    if isinstance(model, InsertedLayer):
        raise Refused("the model has an inserted layer already: tamper with the one from before")
    if not functionals:
        raise mismatch("attack.functionals", "at least one", list(functionals))
    if bins < 2 * len(functionals):
        raise mismatch("attack.bins", f"at least two for each of {len(functionals)} functionals", bins)
    each = [bins // len(functionals) + (position < bins % len(functionals)) for position in range(len(functionals))]
    like = next(model.parameters())
    try:
        rows = nn.Linear(math.prod(input_shape), bins, device=like.device, dtype=like.dtype)
    except (RuntimeError, MemoryError) as error:
        raise mismatch("attack.bins", "as many as fit into memory", bins) from error
    position = 0
    with torch.no_grad():
        for index, (functional, count) in enumerate(zip(functionals, each)):
            known = (moments or {}).get(functional, NATURAL_MOMENTS[functional])
            weight, constant = _functional(functional, known, input_shape, normalization, f"{index} round {round_number}")
            edges = _edges(count, shift=round_number * 0.381966)  # (count + 1,)
            scale = 1 / edges.diff() if sparse else torch.ones(count, dtype=torch.float64)
            part = slice(position, position + count)
            rows.weight[part] = (scale[:, None].to(like) * weight.to(like)).to(like)
            rows.bias[part] = (scale * (constant - edges[:-1])).to(like)
            position += count
    return InsertedLayer(rows, deep_copy(model), tuple(each), sparse).train(model.training)


def measure_moments(inputs: Tensor, normalization: Normalization) -> Moments:
    """The moments of the functionals over at least two samples (n, *shape) that an earlier round recovered."""
    pixels, moments = to_pixels(inputs.double(), normalization), dict(NATURAL_MOMENTS)
    for functional in NATURAL_MOMENTS:
        weight = _weight(functional, tuple(inputs.shape[1:]), "moments").to(pixels)
        values = (pixels * weight).flatten(1).sum(1)
        mean = 0.0 if functional == "random" else float(values.mean())  # the mean of the next round's random functional is another
        moments[functional] = (mean, max(float(values.std()), 1e-6))
    return moments


def _weight(functional: Functional | str, shape: tuple[int, ...], role: str) -> Tensor:
    """The functional's weights on pixels, in float64."""
    if functional == "brightness":
        return torch.full(shape, 1 / math.prod(shape), dtype=torch.float64)
    if functional == "cosine":
        return _cosine(shape) / math.prod(shape)
    weight = torch.randn(shape, generator=generator(0, f"imprint functional {role}"), dtype=torch.float64)
    weight = weight - weight.mean()
    return weight / weight.norm()


def _functional(
    functional: Functional, moments: tuple[float, float], shape: tuple[int, ...], normalization: Normalization | None, role: str
) -> tuple[Tensor, Tensor]:
    """Weights w (d,) and a constant c: ⟨w, x⟩ + c is the functional of the pixels, in standard deviations about its mean. In float64."""
    mean, deviation = moments
    weight = _weight(functional, shape, role)
    weight, constant = weight / deviation, torch.tensor(-mean / deviation, dtype=torch.float64)
    if normalization is not None:  # pixels = x·std + mean, so the weights act on x·std
        offset = to_pixels(torch.zeros(1, *shape, dtype=torch.float64), normalization)
        slope = to_pixels(torch.ones(1, *shape, dtype=torch.float64), normalization) - offset
        weight, constant = weight * slope[0], constant + (weight * offset[0]).sum()
    return weight.flatten(), constant


def _cosine(shape: tuple[int, ...]) -> Tensor:
    """Half a wave over each of the last two axes: the lowest frequencies that a change of brightness leaves alone."""
    waves = [torch.cos(math.pi * (torch.arange(side, dtype=torch.float64) + 0.5) / side) for side in shape[-2:]]
    wave = waves[0][:, None] + waves[1][None, :] if len(waves) == 2 else waves[0]
    return wave.expand(shape)


def _edges(count: int, shift: float) -> Tensor:
    """Edges of `count` bins that a normal variable is equally likely to fall into: (count + 1,). The outer edges hold every input.

    `shift` moves the inner edges by a fraction of a bin, so that samples that share a bin in one round may part in the next.
    """
    levels = (torch.arange(1, count, dtype=torch.float64) - 0.5 * (shift % 1)) / count
    inner = torch.special.ndtri(levels)
    end = torch.tensor([FARTHEST_EDGE], dtype=torch.float64)
    return torch.cat([-end, inner, end])
