"""The layers of a model whose gradients can show their inputs, and the largest batch for which each can."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.network.probing import record_inputs
from dosimeter.network.reads import Reads, Side, freedom, reads_of_module
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator
from dosimeter.types import Normalization

SPARE_EQUATIONS = 1.2  # equations of a position over its unknowns, at least
MOST_REARRANGED = 24  # side of a grid whose rearrangements are counted
PROBES = 4  # random images on which a layer's input must never be negative


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One convolution and the grid it works on. A fully connected layer is a kernel of 1 by 1 on a grid of one position."""

    name: str
    module: nn.Conv2d | nn.Linear
    height: int
    width: int
    non_negative: bool  # its inputs come out of a ReLU, as far as probes tell
    obstacle: str  # "" where the algebra applies

    @property
    def positions(self) -> int:
        return self.height * self.width

    @property
    def weight(self) -> Tensor:
        """(out, in, k, k)"""
        return as_kernel(self.module.weight.detach())

    @property
    def kernel(self) -> tuple[int, int]:
        return self.weight.shape[2], self.weight.shape[3]

    @property
    def groups(self) -> int:
        return getattr(self.module, "groups", 1)

    @property
    def widths(self) -> tuple[int, int]:
        """Outputs and inputs of one group."""
        outputs, inputs = self.weight.shape[:2]
        return outputs // self.groups, inputs

    @property
    def channels(self) -> int:
        """The fewer of a group's inputs and outputs: as many positions can its gradient tell apart."""
        return min(self.widths)

    @property
    def reads(self) -> Reads:
        """Which position each output reads, for each offset of the kernel."""
        return reads_of_module(self.module, self.height, self.width)

    @property
    def most_samples(self) -> int:
        """The largest batch whose positions the channels can hold: those of the inputs, or those of the outputs.

        Groups hold one sample at most, since each would show several in an order of its own.
        """
        most = max(self.most_on("inputs"), self.most_on("outputs"))
        return most if self.groups == 1 else min(most, 1)

    def most_on(self, side: Side) -> int:
        """The largest batch whose positions on one side its channels can hold, with enough equations from the other side."""
        outputs, inputs = self.widths
        if self.obstacle:
            return 0
        if self.positions == 1:
            return self.channels
        output_area = math.prod(
            (size + sum(pads) - (kernel - 1) * spread - 1) // step + 1
            for size, pads, kernel, spread, step in zip((self.height, self.width), *_geometry(self.module))
        )
        area, room, other_area, other = (self.positions, inputs, output_area, outputs)
        if side == "outputs":
            area, room, other_area, other = other_area, other, area, room
        if area > room:
            return 0
        told = self.reads.equations(side) / SPARE_EQUATIONS
        return min(room // area, int(told * other / area)) if told * other_area >= area else 0


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """The largest batch whose maps one layer's gradient can show."""

    layer: str
    limit: int  # samples; 0 where it shows none
    reason: str  # what sets the limit


def largest_batch(model: nn.Module, input_shape: tuple[int, ...], normalization: Normalization | None = None) -> tuple[BatchLimit, ...]:
    """For every convolution and hidden linear layer, in the order in which they run: the largest batch that it exposes.

    The numbers follow from shapes alone: B samples on a grid of H by W have B·H·W positions, and the gradient tells at most as many
    apart as the layer has channels on its narrower side.
    """
    return tuple(_limit(shape) for shape in find_shapes(model, input_shape, normalization or Normalization()))


def _limit(shape: LayerShape) -> BatchLimit:
    if shape.obstacle:
        return BatchLimit(layer=shape.name, limit=0, reason=shape.obstacle)
    group = f" in each of {shape.groups} groups" if shape.groups > 1 else ""
    if shape.most_samples and shape.most_samples > shape.most_on("inputs"):
        reads = shape.reads
        reason = f"{reads.output_height} x {reads.output_width} output positions a sample, {shape.widths[0]} output channels{group}"
    else:
        reason = f"{shape.height} x {shape.width} positions a sample, {shape.channels} channels on the narrower side{group}"
    if group and shape.most_samples:
        reason += ", which would show several samples each in an order of its own"
    if not shape.non_negative and shape.most_samples > 1:
        reason += "; its inputs can be negative, so that it takes the head's proved samples to tell more than one sample apart"
    return BatchLimit(layer=shape.name, limit=shape.most_samples, reason=reason)


def find_shapes(model: nn.Module, input_shape: tuple[int, ...], normalization: Normalization) -> list[LayerShape]:
    """The convolutions and hidden linear layers of a model, in the order in which it runs them."""
    parameter = next(model.parameters())
    rng = generator(0, "probes of the convolutions")
    probes = from_pixels(torch.rand(PROBES, *input_shape, generator=rng), normalization).to(parameter)
    _, received = record_inputs(model, probes, lambda _, module: isinstance(module, nn.Conv2d | nn.Linear))
    if received and isinstance(received[-1][1], nn.Linear):
        received = received[:-1]  # the head, whose inputs are the features
    calls: dict[str, list[Tensor]] = {}
    for name, _, inputs in received:
        calls.setdefault(name, []).append(inputs)
    return [_shape(name, model.get_submodule(name), inputs) for name, inputs in calls.items()]


def _shape(name: str, module: nn.Module, inputs: list[Tensor]) -> LayerShape:
    assert isinstance(module, nn.Conv2d | nn.Linear)
    first = inputs[0]
    grid = first.shape[-2:] if isinstance(module, nn.Conv2d) else (math.prod(first.shape[1:-1]), 1)
    return LayerShape(
        name=name,
        module=module,
        height=grid[0],
        width=grid[1],
        non_negative=bool((first >= 0).all()) and bool((first == 0).any()),
        obstacle=_obstacle(module, (grid[0], grid[1]), len(inputs)),
    )


def as_kernel(weight: Tensor) -> Tensor:
    """(out, in, k, k); a matrix becomes a kernel of 1 by 1."""
    return weight if weight.ndim == 4 else weight[:, :, None, None]


def _obstacle(module: nn.Conv2d | nn.Linear, grid: tuple[int, int], calls: int) -> str:
    """Why the gradient does not show the place of each position."""
    positions = math.prod(grid)
    if calls > 1:
        return "the layer runs more than once in a pass, and its gradient is the sum"
    if isinstance(module, nn.Linear):
        return "" if positions == 1 else "a linear layer on several positions has no shifts that tell their places"
    if math.prod(module.kernel_size) == 1:
        return "" if positions == 1 and math.prod(module.stride) == 1 else "a kernel of 1 by 1 has no shifts"
    if any(dilation > 1 for dilation in module.dilation):
        return f"a dilated kernel moves {math.prod(module.dilation)} interleaved grids, and nothing in its gradient ties them together"
    if module.padding_mode == "circular":
        return "circular padding drops nothing at the edge, so that no position stands out"
    if positions > 2 * math.prod(module.stride) * max(module.in_channels, module.out_channels) / module.groups:
        return ""  # too many positions for the channels, which is said elsewhere
    reads = reads_of_module(module, *grid)
    if not reads.all_read:
        return "the stride leaves positions out"
    if positions > 1 and not (reads.equations("inputs") or reads.equations("outputs")):
        if any(size == 1 and side > 1 for size, side in zip(module.kernel_size, grid)):
            return "a kernel of {} by {} moves nothing along its short side, where positions stay mixed".format(*module.kernel_size)
        ways = freedom(module, *grid) if max(grid) <= MOST_REARRANGED else 0
        if ways == 1:
            return "no walk and no wave over the grid tells its positions"
        strided = "a stride above 1" if any(stride > 1 for stride in module.stride) else "its padding"
        return f"{strided} leaves moved copies of the maps mixed with them" + (f", in {ways} independent ways" if ways else "")
    return ""


def _geometry(module: nn.Conv2d | nn.Linear) -> tuple[list[tuple[int, int]], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Padding before and behind, kernel, dilation and stride, each for rows and columns."""
    if isinstance(module, nn.Linear):
        return [(0, 0), (0, 0)], (1, 1), (1, 1), (1, 1)
    left, right, above, below = module._reversed_padding_repeated_twice
    return [(above, below), (left, right)], module.kernel_size, module.dilation, module.stride
