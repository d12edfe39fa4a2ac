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
MOST_TRIED = 3  # flips that are tried, best first
LEAST_GAINS = (0.95, 0.99)  # shares of the misfit that a flip must bring it below: clear ones first, then one of many

Flip = tuple[int, int]  # a gate and its entry
Estimates = Mapping[int, Tensor]  # of outputs of layers on whose own values the slopes depend


def settle(backward: Backward, layers: Sequence[Layer], value: int, tolerance: float) -> tuple[Solution, int]:
    """Solve for the input of `layers`; correct one rectifier's entry after the other as long as that explains more of the gradients."""
    solution = solve(backward, layers, value, {})
    for flips in range(MOST_FLIPS):
        if solution.misfit <= tolerance or not bool(solution.solved.any()):
            return solution, flips
        better = flip_one(backward, layers, value, solution, {})
        if better is None:
            return solution, flips
        solution = better
    return solution, MOST_FLIPS


def flip_one(backward: Backward, layers: Sequence[Layer], value: int, solution: Solution, at: Estimates) -> Solution | None:
    """The solution after a flip that explains much of what is left; None where no flip explains more."""
    suspect, doubtful = (_best_flips(backward, layers, solution, at, one) for one in (True, False))
    for gain in LEAST_GAINS:
        for flip in dict.fromkeys((*suspect, *doubtful, *backward.uncertain)):
            better = _tried(backward, flip, layers, value, gain * solution.misfit, at)
            if better is not None:
                return better
    return None


def solve(backward: Backward, layers: Sequence[Layer], value: int, at: Estimates) -> Solution:
    """The input of `layers` under the gates as they are."""
    found = {layer.output: backward.slopes(layer.output, at.get(layer.output)) for layer in layers}
    slopes = {output: as_grid(one) for output, one in found.items() if one is not None}
    used = [layer for layer in layers if layer.output in slopes]
    return solve_input(used, slopes, grid_shape(backward.tape.shape(value)), rectified=backward.tape.is_rectifier(value))


def _tried(backward: Backward, flip: Flip, layers: Sequence[Layer], value: int, enough: float, at: Estimates) -> Solution | None:
    """The solution after one flip, where its misfit is below `enough`; else the flip is undone."""
    backward.flip(*flip)
    found = solve(backward, layers, value, at)
    if found.misfit < enough:
        return found
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
        highest = gain.flatten().topk(min(MOST_TRIED, gain.numel()))
        found += [(size, number, entry) for size, entry in zip(highest.values.tolist(), highest.indices.tolist()) if size > 0]
    return [(number, entry) for _, number, entry in sorted(found, reverse=True)[:MOST_TRIED]]


def _unexplained(layer: Layer, solution: Solution) -> Tensor:
    """‖(1 − P) p‖² for the patch p at every place and each output channel: (B, out, positions)."""
    samples, channels = solution.maps.shape[:2]
    patches = layer.patches(solution.maps).reshape(samples, channels, -1, layer.patches(solution.maps[:1]).shape[-1])  # (B, in, k·k, q)
    products = torch.einsum("bcaq,bcdq->bqad", patches, patches)
    absorbed = torch.einsum("oad,bqad->boq", solution.leverage(layer), products)
    return products.diagonal(dim1=2, dim2=3).sum(-1)[:, None] - absorbed


def grid_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    return (shape[0], shape[1], shape[2], shape[3]) if len(shape) == 4 else (shape[0], shape[1], 1, 1)
