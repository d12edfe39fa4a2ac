"""Inputs from exact maps, by Gauss-Newton.

The maps f(x) of the right inputs are known to many digits, so the sum of squares ‖f(x) − maps‖² ends at zero. Near it, Gauss-Newton steps
converge fast where the maps determine the inputs. Each step solves (JᵀJ + damping) s = −Jᵀr by conjugate gradients, with products by J
and Jᵀ alone. Samples do not meet in eval mode, and each has its own step lengths and damping (Levenberg 1944; Marquardt 1963). Behind
batch norm in train mode they do, and the batch is one problem.

Far from the inputs, rectifiers are soft (`softening`), as soft as the maps are off. Conjugate gradients have the spectrum of pictures as
their preconditioner: the first products find the coarse shapes.

A norm behind the first convolution makes the inputs' own direction flat: a multiple of them leads to the same maps, up to the ε of the
norm. Near the end, steps are stretched along it by as much as the maps change less there than elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.downward.norms import Freedom
from dosimeter.engines.downward.softening import SOFTNESS, soften
from dosimeter.engines.downward.tangents import Tangents
from dosimeter.engines.downward.walk import KnownMap
from dosimeter.engines.downward.waves import picture_spectrum
from dosimeter.network.tape import Tape
from dosimeter.progress import advance

FIRST_DAMPING = 1e-4
DAMPING_DOWN, DAMPING_UP = 1 / 3, 4.0
INEXACT = (1e-3, 3e-2)  # squared share of the right side at which conjugate gradients stop: near the end, and far from it
STEP_SHARES = (1.0, 0.25, 0.06)  # of a step that are tried one after the other: a pass each, where the step took many
SMALL_STEP = 3e-5  # root mean square, as a share of the range, below which a sample is done
SMALL_LOSS = 1e-12  # of the maps' squared norm
LARGEST_STRETCH = 1e5
NEAR = 1e-5  # of the maps' squared norm, below which steps are stretched
ROUGHNESS = 1e-2  # of the smoothed total variation, as a share of the range
SOFT = 0.6  # softness of the rectifiers, in units of the maps' relative error
HARD = 0.02  # softness below which they are hard


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """Inputs whose maps are the given ones."""

    inputs: Tensor  # (B, *shape)
    losses: Tensor  # (B,) ‖f(x) − maps‖² over the maps' squared norm
    steps: int


@dataclass(frozen=True, kw_only=True)
class MapTargets:
    """What the inputs must lead to: residuals, each map in units of its own norm."""

    tape: Tape
    tensors: Mapping[str, Tensor]  # in the precision of the passes
    maps: Sequence[KnownMap]

    @property
    def values(self) -> list[int]:
        return [one.value for one in self.maps]

    def softened(self, softness: Tensor) -> MapTargets:
        """The same with soft rectifiers, softness (B,)."""
        if not bool(softness.any()):
            return self
        return replace(self, tape=soften(self.tape), tensors={**self.tensors, SOFTNESS: softness})

    def residuals(self, inputs: Tensor) -> Tensor:
        """(B, *shape) -> (B, entries of all maps)"""
        return self.compare(self.tape.run({0: inputs}, self.tensors, self.values))

    def misfits(self, residuals: Tensor) -> Tensor:
        """(B,) relative errors of each sample's maps, in root mean square over the maps."""
        return (residuals.square().sum(1) / len(self.maps)).sqrt()

    def compare(self, reached: Sequence[Tensor]) -> Tensor:
        """What the inputs lead to, one tensor a map -> (B, entries of all maps)"""
        parts = []
        for one, found in zip(self.maps, reached):
            wanted = torch.where(one.known, one.maps, 0).to(found).flatten(1)
            found = torch.where(one.known, found, 0).flatten(1)
            if one.freedom is None:
                parts.append((found - wanted) / _norm(wanted, "sample"))
            else:  # only the direction of the map is known
                even = _even(one.freedom, wanted)
                parts.append(even * (found / _norm(found, one.freedom) - wanted / _norm(wanted, one.freedom)))
        return torch.cat(parts, 1)


def narrowest(tape: Tape, known: Sequence[KnownMap], head: int) -> list[KnownMap]:
    """The maps nearest to the input, up to those that determine all others."""
    chosen: list[KnownMap] = []
    for one in sorted(known, key=lambda one: one.value):
        chosen.append(one)
        if tape.follows_from(head, [each.value for each in chosen if each.whole and each.freedom is None]):
            break
    return chosen


def invert(
    targets: MapTargets,
    start: Tensor,
    bounds: tuple[Tensor, Tensor],
    *,
    steps: int,
    products: int,
    variation: float = 0.0,
    joint: bool = False,
    seconds: float | None = None,
) -> Inversion:
    """Inputs within bounds that lead to the maps; `products` by the Gauss-Newton matrix a step at most.

    `variation` weighs smoothed total variation at the first step. Its weight falls with the residuals' squared norm.
    """
    low, high = (bound.expand_as(start) for bound in bounds)
    width = (high - low).amax()
    here, damping = start, torch.full((len(start),), FIRST_DAMPING, dtype=start.dtype, device=start.device)
    softness = _softness_of(targets, start)
    smoothing = _spectral(start)
    began, first, step = time.monotonic(), None, 0
    losses = torch.full((len(start),), torch.inf)
    for step in range(1, steps + 1):
        softened = targets.softened(softness)
        linear = _Linear(softened, here)
        losses = _total(linear.value, linear.value, joint)
        first = losses if first is None else first
        smooth = _Smoothness.at(here, variation * losses / first, ROUGHNESS * width)
        slope = linear.transposed(linear.value) + smooth(here)
        free = ~(((here <= low) & (slope > 0)) | ((here >= high) & (slope < 0)))
        stretch = _Stretch.along(here * free, linear, slope * free, losses < NEAR, joint)
        move = stretch(
            _conjugate_gradients(
                lambda way, linear=linear, smooth=smooth, free=free, damping=damping, stretch=stretch: (
                    stretch(free * (linear.transposed(linear(stretch(way))) + smooth(stretch(way)))) + _wide(damping, way) * way
                ),
                lambda way, free=free: free * smoothing(free * way),
                stretch(-slope * free),
                losses.clamp(*INEXACT),
                products,
                joint,
            )
        )
        tried = [torch.minimum(torch.maximum(here + share * move, low), high) for share in STEP_SHARES]
        length = (tried[0] - here).flatten(1).square().mean(1).sqrt() / width
        height, left = losses + smooth.height(here, joint), linear.value
        better = whole = torch.zeros_like(losses, dtype=torch.bool)
        for moved in tried:
            with torch.no_grad():
                after = softened.residuals(moved)
            reached = _total(after, after, joint)
            lower = ~better & (reached + smooth.height(moved, joint) < height)
            here, left = torch.where(_wide(lower, here), moved, here), torch.where(_wide(lower, after), after, left)
            losses, better = torch.where(lower, reached, losses), better | lower
            whole = lower if moved is tried[0] else whole
            if bool(better.all()):
                break
        damping = torch.where(whole, damping * DAMPING_DOWN, damping * DAMPING_UP)
        advance(step, steps, f"maps' misfit {float(losses.max()):.2g}")
        done = (softness == 0) & ((losses < SMALL_LOSS) | (length < SMALL_STEP))
        softness = _harder(softness, targets.misfits(left), better)
        if bool(done.all()) or (seconds is not None and time.monotonic() - began > seconds):
            break
    return Inversion(inputs=here, losses=losses, steps=step)


def _softness_of(targets: MapTargets, start: Tensor) -> Tensor:
    """As much as the start's maps are off (B,). Softer rectifiers let more through, and steps with them lead away from a good start."""
    with torch.no_grad():
        misfits = targets.misfits(targets.residuals(start))
    return _harder(torch.ones_like(misfits), misfits, torch.ones_like(misfits, dtype=torch.bool))


def _harder(softness: Tensor, misfits: Tensor, better: Tensor) -> Tensor:
    """As soft as a share of a sample's misfit (B,), and never softer than before; half as soft where a step failed."""
    wanted = torch.minimum(torch.where(better, softness, softness / 2), SOFT * misfits.to(softness))
    return torch.where(wanted < HARD, 0.0, wanted)


class _Linear:
    """The residuals near one point: their value, and products by their Jacobian J and its transpose."""

    def __init__(self, targets: MapTargets, inputs: Tensor) -> None:
        self._targets, self._tangents = targets, Tangents(targets.tape, targets.tensors, inputs, targets.values)
        self.value = targets.compare(self._tangents.values)
        self._sizes = [one[0].numel() for one in self._tangents.values]

    def __call__(self, way: Tensor) -> Tensor:
        return torch.cat(self._compared([one.flatten(1) for one in self._tangents.along(way)]), 1)

    def transposed(self, weights: Tensor) -> Tensor:
        each = self._compared(weights.split(self._sizes, 1))
        return self._tangents.back([one.view_as(like) for one, like in zip(each, self._tangents.values)])

    def _compared(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """The derivative of `MapTargets.compare`, which is symmetric."""
        parts = []
        for one, reached, change in zip(self._targets.maps, self._tangents.values, changes):
            known = one.known.flatten(1)
            change = change * known
            if one.freedom is None:
                parts.append(change / _norm(torch.where(one.known, one.maps, 0).to(change).flatten(1), "sample"))
                continue
            found = reached.flatten(1) * known
            size = _norm(found, one.freedom)
            along = (found * change).sum(1, keepdim=True)
            along = along.sum(0, keepdim=True) if one.freedom == "batch" else along
            parts.append(_even(one.freedom, found) * (change - found * along / size**2) / size)
        return parts


class _Stretch:
    """Multiplies the part along one direction of each sample, or of the batch, by a factor."""

    def __init__(self, direction: Tensor, factors: Tensor, joint: bool) -> None:
        self._direction, self._factors, self._joint = direction, factors, joint

    @classmethod
    def along(cls, direction: Tensor, linear: _Linear, slope: Tensor, near: Tensor, joint: bool) -> _Stretch:
        """As much as the residuals change less along `direction` than along their slope, for samples that are `near` (B,)."""
        tiny = torch.finfo(direction.dtype).tiny
        unit, steepest = (one / _wide(_total(one, one, joint).clamp_min(tiny).sqrt(), one) for one in (direction, slope))
        flat, steep = (_total(change, change, joint) for change in (linear(unit), linear(steepest)))
        factors = (steep / flat.clamp_min(tiny)).sqrt().clamp(1, LARGEST_STRETCH)
        return cls(unit, torch.where(near, factors, 1), joint)

    def __call__(self, way: Tensor) -> Tensor:
        along = _total(self._direction, way, self._joint)
        return way + _wide((self._factors - 1) * along, way) * self._direction


class _Smoothness:
    """Half of a quadratic bound of the smoothed total variation, one weight a sample."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = weights

    @classmethod
    def at(cls, inputs: Tensor, weight: Tensor, roughness: Tensor) -> _Smoothness:
        if inputs.ndim != 4 or not bool(weight.any()):
            return cls([])
        count = inputs[0].numel()
        spread = [(one.square() + roughness**2).rsqrt() * _wide(weight, one) / count for one in _differences(inputs)]
        return cls(spread)

    def __call__(self, way: Tensor) -> Tensor:
        if not self._weights:
            return torch.zeros_like(way)
        rows, columns = (weight * one for weight, one in zip(self._weights, _differences(way)))
        found = torch.zeros_like(way)
        found[:, :, 1:] += rows
        found[:, :, :-1] -= rows
        found[:, :, :, 1:] += columns
        found[:, :, :, :-1] -= columns
        return found

    def height(self, inputs: Tensor, joint: bool) -> Tensor:
        """(B,)"""
        return _total(inputs, self(inputs), joint)


def _norm(values: Tensor, of: Freedom) -> Tensor:
    """Of each sample (B, 1), or of the whole batch (1, 1)."""
    squares = values.square().sum(1, keepdim=True)
    return (squares if of == "sample" else squares.sum(0, keepdim=True)).clamp_min(torch.finfo(values.dtype).tiny).sqrt()


def _even(freedom: Freedom, like: Tensor) -> float:
    """The weight of a map whose factor is free, so that a batch counts as much as its samples one by one."""
    return len(like) ** 0.5 if freedom == "batch" else 1.0


def _differences(inputs: Tensor) -> tuple[Tensor, Tensor]:
    return inputs[:, :, 1:] - inputs[:, :, :-1], inputs[:, :, :, 1:] - inputs[:, :, :, :-1]


def _spectral(like: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiplies each wave of a picture by the size that it has in pictures; inputs without a grid stay as they are."""
    if like.ndim != 4:
        return lambda way: way
    sides = like.shape[2:]
    sizes = picture_spectrum(*sides).to(like)
    return lambda way: torch.fft.irfft2(torch.fft.rfft2(way) * sizes, s=sides)


def _conjugate_gradients(
    matrix: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    right: Tensor,
    inexact: Tensor,
    most: int,
    joint: bool,
) -> Tensor:
    """The solution up to an `inexact` share (B,) of the right side's square."""
    tiny = torch.finfo(right.dtype).tiny
    found, left = torch.zeros_like(right), right
    way = precondition(left)
    size = first = _total(left, way, joint)
    for _ in range(most):
        product = matrix(way)
        length = size / _total(way, product, joint).clamp_min(tiny)
        found, left = found + _wide(length, way) * way, left - _wide(length, way) * product
        better = precondition(left)
        after = _total(left, better, joint)
        way = better + _wide(after / size.clamp_min(tiny), way) * way
        size = after
        if bool((size <= inexact * first).all()):
            break
    return found


def _total(first: Tensor, second: Tensor, joint: bool) -> Tensor:
    """Inner products: (B,), or the whole batch's, B times."""
    each = (first * second).flatten(1).sum(1)
    return each.sum().expand(len(each)) if joint else each


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *([1] * (like.ndim - 1)))
