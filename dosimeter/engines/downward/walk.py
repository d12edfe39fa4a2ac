"""Down a network from one layer whose maps are exact: R-GAP's recursion for whole batches of residual networks.

Zhu and Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021, walk one sample down a plain network. Here the slopes are those
of the whole batch, every layer's input is one linear problem (`equations`), and a sum of branches needs no inverse. A rectifier's entry
near zero may pass slopes or not. A wrong choice shows as a residual of the next problem. It is found there and corrected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.downward.equations import Solution, solve_input
from dosimeter.engines.downward.layers import Layer, as_grid
from dosimeter.engines.downward.norms import Freedom, complete_slopes
from dosimeter.engines.downward.slopes import Backward, Gate

LARGEST_MISFIT = 1e-5  # of the gradients that a map explains, relative
LARGEST_COMPLETED_MISFIT = 1e-2  # where slopes were completed from open entries
LEAST_EXCESS = 1.05  # equations for each unknown, below which a small misfit proves nothing
ZERO_SLACK = 2.0  # over the most negative entry, up to which an entry is a rectifier's zero
DOUBT_SLACK = 30.0  # over the most negative entry, up to which an entry may be open or closed
MOST_FLIPS = 12
LEAST_GAIN = 0.95  # a flip must bring the misfit below this share of what it was


@dataclass(frozen=True, kw_only=True)
class KnownMap:
    """One value of the tape, for every sample."""

    value: int
    maps: Tensor  # (B, *shape)
    known: Tensor  # (B, *shape) bool: where the maps are known
    misfit: float  # of the gradients that the maps explain
    freedom: Freedom | None = None  # what of the maps shares one unknown factor
    flips: int = 0  # rectifier entries that were corrected to explain them

    @property
    def whole(self) -> bool:
        return bool(self.known.all())


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The maps that were reached, from the start down."""

    known: tuple[KnownMap, ...]
    reasons: Mapping[int, str]  # why a value was left, or a part of it, by its number


def walk_down(backward: Backward, layers: Mapping[int, Sequence[Layer]], start: KnownMap, *, tolerance: float = LARGEST_MISFIT) -> Walk:
    """Every value below `start` that the gradients determine. `backward` holds the gate of `start`, and gets those of the others."""
    tape, known, reasons = backward.tape, [start], {}
    for value in sorted((one for one in layers if one < start.value), reverse=True):
        readable = [layer for layer in layers[value] if layer.groups == 1 and backward.slopes(layer.output) is not None]
        if not readable:
            completed = _complete(backward, layers[value], value)
            if completed is not None:
                known.append(completed)
            else:
                reasons[value] = "the slopes behind it depend on maps that are not known"
            continue
        solution, flips = _settle(backward, readable, value, tolerance)
        if not bool(solution.solved.any()):
            reasons[value] = solution.reason
            continue
        if solution.misfit > tolerance:
            reasons[value] = f"no choice of open rectifiers explains the gradients (misfit {solution.misfit:.1g})"
            continue
        if solution.excess < LEAST_EXCESS:
            reasons[value] = "as many unknowns as equations, so that nothing checks them"
            continue
        if solution.reason:
            reasons[value] = f"in part: {solution.reason}"
        origin = tape.before_reshaping(value)
        maps, level = _rectified(solution) if tape.is_rectifier(origin) else (solution.maps, 0.0)
        there = solution.solved.expand_as(maps).reshape(tape.shape(origin))
        one = KnownMap(value=origin, maps=maps.reshape(tape.shape(origin)), known=there, misfit=solution.misfit, flips=flips)
        known.append(one)
        if tape.is_rectifier(origin):
            backward.put(origin, Gate(maps=one.maps, opened=one.maps > 0, known=there, doubt=DOUBT_SLACK * level))
    return Walk(known=tuple(known), reasons=reasons)


def _complete(backward: Backward, layers: Sequence[Layer], value: int) -> KnownMap | None:
    """The input of a layer before a norm with statistics of its own, up to a factor; None where it does not come out."""
    for layer in layers:
        found = complete_slopes(backward, layer) if layer.groups == 1 else None
        if found is None:
            continue
        tape = backward.tape
        solution = solve_input([layer], {layer.output: found.slopes}, _grid_shape(tape.shape(value)))
        if solution.misfit < LARGEST_COMPLETED_MISFIT and bool(solution.solved.any()):
            maps, _ = _rectified(solution) if tape.is_rectifier(value) else (solution.maps, 0.0)
            there = solution.solved.expand_as(maps)
            return KnownMap(value=value, maps=maps, known=there, misfit=solution.misfit, freedom=found.freedom)
    return None


def _settle(backward: Backward, layers: Sequence[Layer], value: int, tolerance: float) -> tuple[Solution, int]:
    """Solve for the input of `layers`; correct one rectifier's entry after the other as long as that explains more of the gradients."""
    solution = _solve(backward, layers, value)
    for flips in range(MOST_FLIPS):
        if solution.misfit <= tolerance or not bool(solution.solved.any()):
            return solution, flips
        found = _best_flip(backward, layers, solution)
        better = None if found is None else _tried(backward, found, layers, value, LEAST_GAIN * solution.misfit)
        for one in backward.uncertain if better is None else ():
            better = _tried(backward, one, layers, value, LEAST_GAIN * solution.misfit)
            if better is not None:
                break
        if better is None:
            return solution, flips
        solution = better
    return solution, MOST_FLIPS


def _tried(backward: Backward, flip: tuple[int, int], layers: Sequence[Layer], value: int, enough: float) -> Solution | None:
    """The solution after one flip, where its misfit is below `enough`; else the flip is undone."""
    backward.flip(*flip)
    found = _solve(backward, layers, value)
    if found.misfit < enough:
        return found
    backward.flip(*flip)
    return None


def _best_flip(backward: Backward, layers: Sequence[Layer], solution: Solution) -> tuple[int, int] | None:
    """The gate and the entry whose opening or closing explains most of what is left of the gradients, among the doubtful ones.

    Let an entry change the slope at its place by δ, and let p be the patch of the input there. Then the residual R of the gradient becomes
    R − δ (1 − P) p, with P the projection on what the slopes explain. Its square falls by 2 δ ⟨R, p⟩ − δ² ‖(1 − P) p‖². The products ⟨R, p⟩
    at all places are the layer's convolution with R as its kernel.
    """
    best: tuple[float, int, int] | None = None
    for layer in layers:
        number = backward.gate_behind(layer.output)
        if number is None or backward.tape.shape(number) != backward.tape.shape(layer.output):
            continue
        gate = backward.gates[number]
        backward.put(number, replace(gate, opened=torch.ones_like(gate.opened)))
        passed = backward.slopes(layer.output)
        backward.put(number, gate)
        if passed is None:
            continue
        change = as_grid(torch.where(gate.opened, -passed, passed))
        products = layer.correlate(solution.maps, solution.residuals[layer.output])
        energy = _unexplained(layer, solution).reshape_as(change)
        gain = torch.where(as_grid(gate.doubtful), 2 * change * products - change.square() * energy, -torch.inf)
        entry = int(gain.argmax())
        if float(gain.flatten()[entry]) > (best[0] if best else 0.0):
            best = float(gain.flatten()[entry]), number, entry
    return None if best is None else best[1:]


def _unexplained(layer: Layer, solution: Solution) -> Tensor:
    """‖(1 − P) p‖² for the patch p at every place and each output channel: (B, out, positions)."""
    samples, channels = solution.maps.shape[:2]
    patches = layer.patches(solution.maps).reshape(samples, channels, -1, layer.patches(solution.maps[:1]).shape[-1])  # (B, in, k·k, q)
    products = torch.einsum("bcaq,bcdq->bqad", patches, patches)
    absorbed = torch.einsum("oad,bqad->boq", solution.leverage(layer), products)
    return products.diagonal(dim1=2, dim2=3).sum(-1)[:, None] - absorbed


def _solve(backward: Backward, layers: Sequence[Layer], value: int) -> Solution:
    slopes = {layer.output: as_grid(found) for layer in layers if (found := backward.slopes(layer.output)) is not None}
    return solve_input([layer for layer in layers if layer.output in slopes], slopes, _grid_shape(backward.tape.shape(value)))


def _rectified(solution: Solution) -> tuple[Tensor, float]:
    """The maps with a rectifier's zeros in place of the noise around them, and the noise's largest size."""
    level = float((-solution.maps).clamp_min(0).max())
    return torch.where(solution.maps > ZERO_SLACK * level, solution.maps, 0), level


def _grid_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    return (shape[0], shape[1], shape[2], shape[3]) if len(shape) == 4 else (shape[0], shape[1], 1, 1)
