"""What a guess is made of: how many samples, under which labels, from which start, within which bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.client.losses import OwnLoss, as_distribution
from dosimeter.columns import Columns
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.files import readable_size
from dosimeter.interfaces import Exposure
from dosimeter.memory import spare_memory
from dosimeter.normalization import input_bounds
from dosimeter.options import first_line
from dosimeter.types import LabelEstimate, Refused

TILES = 4  # of a tiled start, along each side
START_COPIES = 4  # of all restarts' samples, before the first step


@dataclass(frozen=True, kw_only=True)
class Guess:
    """The fixed part of a guess. The moving part is one row of numbers for each restart: see `unpack`."""

    shape: tuple[int, ...]  # (B, *input shape)
    output: tuple[int, ...]  # of one sample's target where that moves: mostly the shape of the model's output
    targets: Tensor | None  # (B,) class ids, (B, C) soft labels, or numbers (B, *output); None where they move
    low: Tensor
    high: Tensor
    columns: Columns | None = None  # of a table, where they are declared

    def unpack(self, variables: Tensor) -> tuple[Tensor, Tensor | None]:
        """(R, D) -> inputs (R, B, *shape) and label logits (R, B, *output), if these move."""
        size = torch.Size(self.shape).numel()
        inputs = variables[:, :size].reshape(len(variables), *self.shape)
        if self.targets is not None:
            return inputs, None
        return inputs, variables[:, size:].reshape(len(variables), self.shape[0], *self.output)

    def pack(self, inputs: Tensor, logits: Tensor | None) -> Tensor:
        """The inverse of `unpack`: (R, D)."""
        return inputs.flatten(1) if logits is None else torch.cat([inputs.flatten(1), logits.flatten(1)], 1)

    def clamp_to_range(self, variables: Tensor) -> Tensor:
        """Clamp the inputs to the data range, and columns of categories to distributions over their categories: (R, D)."""
        inputs, logits = self.unpack(variables)
        inputs = inputs.clamp(self.low, self.high)
        return self.pack(inputs if self.columns is None else self.columns.project(inputs), logits)


def make_guess(exposure: Exposure, labels: LabelEstimate | None, recipe: Recipe) -> Guess:
    """The batch size and the labels to guess under; refused where nothing tells them."""
    size, loss = _batch_size(exposure, labels), exposure.public.loss
    if recipe.joint_labels:
        _check_guessed_targets(exposure)
        return guess_under(exposure, size, None)
    if labels is None:
        raise Refused("labels: pass labels=dm.recover_labels(exposure, ...) or a tensor, or let the attack optimise them")
    like = next(iter(exposure.update.values()))
    known = labels.labels if labels.soft is None else labels.soft
    targets = known.to(like) if known.is_floating_point() else known.to(like.device)
    if isinstance(loss, OwnLoss) and loss.target_kind() == "labels" and not targets.is_floating_point():
        width = exposure.public.classes  # PyTorch's losses of several labels take rows of zeros and ones
        targets = as_distribution(targets, width, like.dtype) if width > 1 else targets.to(like)[:, None]
        targets = targets if exposure.public.output_shape is None else targets.reshape(size, *exposure.public.output_shape)
    if labels.soft is not None and loss.shift_invariant and not bool((targets.flatten(1).sum(1) > 0).all()):
        raise Refused(f"labels: a soft label of {loss.name} shares out a positive weight, and one of these is 0 in every class")
    if targets.is_floating_point() and exposure.public.output_shape is not None:
        targets = targets.reshape(size, *loss.target_shape(exposure.public.output_shape))
    return guess_under(exposure, size, targets)


def _check_guessed_targets(exposure: Exposure) -> None:
    """Refuse a loss of the client's own that fails on targets which an attack makes up, as one that takes class ids alone."""
    public, loss = exposure.public, exposure.public.loss
    if not isinstance(loss, OwnLoss):
        return
    like = next(iter(exposure.update.values()))
    output = (public.classes,) if public.output_shape is None else public.output_shape
    try:
        loss(like.new_zeros(2, *output), like.new_full((2, *loss.target_shape(output)), 0.5))
    except RuntimeError as error:
        raise Refused(
            f"the client's loss takes no targets that an attack makes up: {first_line(error)}; pass the targets as labels="
        ) from None


def guess_under(exposure: Exposure, size: int, targets: Tensor | None) -> Guess:
    """A guess of `size` samples under given targets, or under targets that move."""
    public, like = exposure.public, next(iter(exposure.update.values()))
    low, high = input_bounds(public.normalization, like.new_zeros(size, *public.input_shape))
    output = (public.classes,) if public.output_shape is None else public.output_shape
    output = public.loss.target_shape(output)
    columns = public.normalization if isinstance(public.normalization, Columns) else None
    return Guess(shape=(size, *public.input_shape), output=output, targets=targets, low=low, high=high, columns=columns)


def draw_start(guess: Guess, labels: LabelEstimate | None, recipe: Recipe, rng: Generator) -> Tensor:
    """One start for each restart, (R, D). The first starts do not depend on how many follow."""
    size = math.prod(guess.shape) + (0 if guess.targets is not None else guess.shape[0] * math.prod(guess.output))
    needed = START_COPIES * recipe.restarts * size * guess.low.element_size()
    if guess.low.device.type == "cpu" and needed > spare_memory():
        raise Refused(
            f"{recipe.restarts} restarts need about {readable_size(needed)} of memory for their samples alone; try fewer restarts"
        )
    starts = [_draw_one(guess, labels, recipe, rng, sloping=restart % 2 == 1) for restart in range(recipe.restarts)]
    return torch.stack(starts)


def _draw_one(guess: Guess, labels: LabelEstimate | None, recipe: Recipe, rng: Generator, *, sloping: bool) -> Tensor:
    like = guess.low
    noise = torch.randn(guess.shape, generator=rng, device=rng.device).to(like)
    if recipe.start == "normal":
        inputs = noise
    elif recipe.start == "uniform":
        inputs = guess.low + (guess.high - guess.low) * torch.special.ndtr(noise)
    elif recipe.start == "coloured":
        inputs = guess.low + (guess.high - guess.low) * (torch.special.ndtr(_colours(noise, rng, sloping)) + 0.5 * noise)
    elif recipe.start == "constant":
        inputs = ((guess.low + guess.high) / 2).expand(guess.shape).clone()
    elif recipe.start == "tiled":
        inputs = guess.low + (guess.high - guess.low) * torch.special.ndtr(_tiles(noise))
    else:
        inputs = (guess.low + guess.high) / 2 + 0.01 * (guess.high - guess.low) * noise
    if guess.targets is not None:
        return inputs.flatten()
    logits = torch.randn(guess.shape[0], *guess.output, generator=rng, device=rng.device).to(like)
    if labels is not None and len(guess.output) == 1:
        logits = _as_logits(labels, guess.output[0]).to(like)
    return torch.cat([inputs.flatten(), logits.flatten()])


def _tiles(noise: Tensor) -> Tensor:
    """The first quarter of each side, repeated over the sample: (B, channels, ...)."""
    for axis in range(2, noise.ndim):
        patch = noise.narrow(axis, 0, -(-noise.shape[axis] // TILES))
        noise = torch.cat([patch] * TILES, axis).narrow(axis, 0, noise.shape[axis])
    return noise


def _colours(noise: Tensor, rng: Generator, sloping: bool) -> Tensor:
    """Normal deviates of one colour a sample (B, channels, ...). `sloping` lets the colour change linearly along each axis."""
    colours = noise.reshape(*noise.shape[:2], -1)[..., :1].expand(-1, -1, noise[0, 0].numel()).reshape(noise.shape)
    if not sloping:
        return colours
    colours = 0.7 * colours
    slopes = 1.5 * torch.randn(len(noise), noise.ndim - 2, generator=rng, device=rng.device).to(noise)  # (B, axes)
    for axis, slope in enumerate(slopes.T, start=2):
        along = torch.linspace(-1, 1, noise.shape[axis]).to(noise).reshape(-1, *[1] * (noise.ndim - axis - 1))
        colours = colours + slope.reshape(-1, *[1] * (noise.ndim - 1)) * along
    return colours


def _as_logits(labels: LabelEstimate, classes: int) -> Tensor:
    """Logits (B, C) whose softmax is the estimate. A floor keeps classes of weight 0 finite."""
    known = labels.labels if labels.soft is None else labels.soft
    return as_distribution(known, classes, torch.float64).clamp_min(1e-4).log()


def _batch_size(exposure: Exposure, labels: LabelEstimate | None) -> int:
    declared = exposure.public.batch_size
    if labels is None:
        if declared is None:
            raise Refused("the batch size is unknown: the client does not declare it, and no labels say how many samples there are")
        return declared
    count = len(labels.labels) if labels.soft is None else len(labels.soft)
    if declared is not None and count != declared:
        raise Refused(f"labels: expected {declared}, one for each sample of the declared batch, got {count}")
    if count == 0:
        raise Refused("labels: the estimate holds no label, so there is nothing to guess")
    return count
