"""Doubtful entries of rectifiers, settled by the residual of the least squares below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dosimeter.engines.downward.equations import Solution, solve_input
from dosimeter.engines.downward.layers import Layer, as_grid
from dosimeter.engines.downward.slopes import Backward

MOST_FLIPS = 60
MOST_TOGETHER = 8  # flips that are tried at once
MOST_SINGLE = 3  # flips that are tried one by one
LEAST_SHARE = 0.3  # of the best flip's gain, to be tried with it
LEAST_GAIN = 0.99  # a flip must bring the misfit below this share of what it was: one of many wrong entries explains little

Flip = tuple[int, int]  # a gate and its entry
Estimates = Mapping[int, Tensor]  # of outputs of layers on whose own values the slopes depend


def settle(backward: Backward, layers: Sequence[Layer], value: int, tolerance: float) -> tuple[Solution, int]:
    """Solve for the input of `layers`; correct rectifiers' entries as long as that explains more of the gradients."""
    solution, flips = solve(backward, layers, value, {}), 0
    while solution.misfit > tolerance and bool(solution.solved.any()) and flips < MOST_FLIPS:
        better = flip_best(backward, layers, value, solution, {})
        if better is None:
            break
        solution, flips = better[0], flips + better[1]
    return solution, flips


def flip_best(backward: Backward, layers: Sequence[Layer], value: int, solution: Solution, at: Estimates) -> tuple[Solution, int] | None:
    """The solution after the flips that explain most of what is left, and their number; None where no flip explains more."""
    for suspect in (True, False):
        best = _best_flips(backward, layers, solution, at, suspect)
        single = best[:MOST_SINGLE] + ([] if suspect else backward.uncertain)
        for several in ([best] if len(best) > 1 else []) + [[one] for one in single]:
            better = _tried(backward, several, layers, value, LEAST_GAIN * solution.misfit, at)
            if better is not None:
                return better, len(several)
    return None


def solve(backward: Backward, layers: Sequence[Layer], value: int, at: Estimates) -> Solution:
    """The input of `layers` under the gates as they are."""
    found = {layer.output: backward.slopes(layer.output, at.get(layer.output)) for layer in layers}
    slopes = {output: as_grid(one) for output, one in found.items() if one is not None}
    used = [layer for layer in layers if layer.output in slopes]
    return solve_input(used, slopes, grid_shape(backward.tape.shape(value)), rectified=backward.tape.is_rectifier(value))


def _tried(backward: Backward, flips: Sequence[Flip], layers: Sequence[Layer], value: int, enough: float, at: Estimates) -> Solution | None:
    """The solution after some flips, where its misfit is below `enough`; else the flips are undone."""
    for flip in flips:
        backward.flip(*flip)
    found = solve(backward, layers, value, at)
    if found.misfit < enough:
        return found
    for flip in flips:
        backward.flip(*flip)
    return None


def _best_flips(backward: Backward, layers: Sequence[Layer], solution: Solution, at: Estimates, suspect: bool) -> list[Flip]:
    """The entries whose opening or closing explains most of what is left of the gradients, best first; suspect or doubtful ones.

    Let an entry change the slope at its place by δ, and let p be the patch of the input there. Then the residual R of the gradient becomes
    R − δ (1 − P) p, with P the projection on what the slopes explain. Its square falls by 2 δ ⟨R, p⟩ − δ² ‖(1 − P) p‖². The products ⟨R, p⟩
    at all places are the layer's convolution with R as its kernel.
    """
    found: list[tuple[float, int, int]] = []
    for layer in layers:
        number = backward.gate_behind(layer.output)
        if number is None or backward.tape.shape(number) != backward.tape.shape(layer.output):
            continue
        gate = backward.gates[number]
        backward.put(number, replace(gate, opened=torch.ones_like(gate.opened)))
        passed = backward.slopes(layer.output, at.get(layer.output), frozen=True)
        backward.put(number, gate)
        if passed is None:
            continue
        change = as_grid(torch.where(gate.opened, -passed, passed))
        products = layer.correlate(solution.maps, solution.residuals[layer.output])
        energy = _unexplained(layer, solution).reshape_as(change)
        gain = torch.where(
            as_grid(gate.suspect if suspect else gate.doubtful), 2 * change * products - change.square() * energy, -torch.inf
        )
        highest = gain.flatten().topk(min(MOST_TOGETHER, gain.numel()))
        found += [(size, number, entry) for size, entry in zip(highest.values.tolist(), highest.indices.tolist()) if size > 0]
    found.sort(reverse=True)
    return [(number, entry) for size, number, entry in found[:MOST_TOGETHER] if size > LEAST_SHARE * found[0][0]]


def _unexplained(layer: Layer, solution: Solution) -> Tensor:
    """‖(1 − P) p‖² for the patch p at every place and each output channel: (B, out, positions)."""
    samples, channels = solution.maps.shape[:2]
    patches = layer.patches(solution.maps).reshape(samples, channels, -1, layer.patches(solution.maps[:1]).shape[-1])  # (B, in, k·k, q)
    products = torch.einsum("bcaq,bcdq->bqad", patches, patches)
    absorbed = torch.einsum("oad,bqad->boq", solution.leverage(layer), products)
    return products.diagonal(dim1=2, dim2=3).sum(-1)[:, None] - absorbed


def grid_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    return (shape[0], shape[1], shape[2], shape[3]) if len(shape) == 4 else (shape[0], shape[1], 1, 1)
