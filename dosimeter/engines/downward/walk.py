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

from dosimeter.engines.downward.consistency import fit_sum, scaled, solve_consistently
from dosimeter.engines.downward.equations import Solution
from dosimeter.engines.downward.layers import Layer
from dosimeter.engines.downward.norms import Freedom
from dosimeter.engines.downward.settling import settle
from dosimeter.engines.downward.slopes import Backward, Gate

LARGEST_MISFIT = 1e-5  # of the gradients that a map explains, relative
LEAST_EXCESS = 1.05  # equations for each unknown, below which a small misfit proves nothing
ZERO_SLACK = 2.0  # over the most negative entry, up to which an entry is a rectifier's zero
SUSPECT_SLACK = 0.5  # over the most negative entry, from which on a zero is suspect
DOUBT_SLACK = 30.0  # over the most negative entry, up to which an entry may be open or closed


@dataclass(frozen=True, kw_only=True)
class KnownMap:
    """One value of the tape, for every sample."""

    value: int
    maps: Tensor  # (B, *shape)
    known: Tensor  # (B, *shape) bool: where the maps are known
    misfit: float  # of the gradients that the maps explain
    freedom: Freedom | None = None  # what of the maps shares one unknown factor
    flips: int = 0  # rectifier entries that were corrected to explain them
    condition: float = 1.0  # of the equations that were solved for them
    factor_error: float = 0.0  # relative, of a factor that other layers told

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
            reason = _add_consistent(backward, layers[value], value, known, tolerance)
            if reason:
                reasons[value] = reason
            continue
        solution, flips = settle(backward, readable, value, tolerance)
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
        maps, noise = _rectified(solution) if tape.is_rectifier(origin) else (solution.maps, solution.maps)
        there = solution.solved.expand_as(maps).reshape(tape.shape(origin))
        one = KnownMap(
            value=origin,
            maps=maps.reshape(tape.shape(origin)),
            known=there,
            misfit=solution.misfit,
            flips=flips,
            condition=solution.condition,
        )
        known.append(one)
        if tape.is_rectifier(origin):
            backward.put(origin, _gate(one.maps, solution.maps.reshape(one.maps.shape), noise.reshape(one.maps.shape), there))
    return Walk(known=tuple(known), reasons=reasons)


def _add_consistent(backward: Backward, layers: Sequence[Layer], value: int, known: list[KnownMap], tolerance: float) -> str:
    """Add the input of layers before norms with statistics of their own, and the factors that it tells; or say why there is none."""
    found = solve_consistently(backward, layers, value, tolerance)
    if isinstance(found, str):
        return found
    tape = backward.tape
    behind = {backward.gate_behind(layer.output) for layer in layers}
    for index, one in enumerate(known):
        if one.value in behind and one.freedom is not None:
            told = found.solution.condition * found.solution.misfit
            known[index] = replace(one, maps=scaled(one.maps, 1 / found.factors), freedom=None, factor_error=told)
            gate = backward.gates[one.value]
            backward.put(one.value, replace(gate, maps=known[index].maps))
    raw = found.solution.maps
    maps, noise = _rectified(found.solution) if tape.is_rectifier(value) else (raw, raw)
    freedom, of_factor = found.freedom, 0.0
    if freedom is not None:
        sized = {one.value: one.maps for one in known if one.whole and one.freedom is None}
        fitted = fit_sum(backward, sized, value, maps, freedom)
        if fitted is not None:
            factors, of_factor = fitted
            maps, raw, noise, freedom = *(scaled(one, factors) for one in (maps, raw, noise)), None
    there = torch.ones_like(maps, dtype=torch.bool)
    solved = found.solution
    known.append(
        KnownMap(
            value=value,
            maps=maps,
            known=there,
            misfit=solved.misfit,
            freedom=freedom,
            flips=found.flips,
            condition=solved.condition,
            factor_error=of_factor,
        )
    )
    if tape.is_rectifier(value):
        backward.put(value, _gate(maps, raw, noise, there))
    return ""


def _gate(maps: Tensor, raw: Tensor, noise: Tensor, known: Tensor) -> Gate:
    """The gate of rectified maps. Any zero may have been open, by less than the noise. Values just above the noise are suspect."""
    doubtful = known & (maps <= DOUBT_SLACK * noise)
    return Gate(maps=maps, opened=maps > 0, known=known, doubtful=doubtful, suspect=doubtful & (raw > SUSPECT_SLACK * noise))


def _rectified(solution: Solution) -> tuple[Tensor, Tensor]:
    """The maps with a rectifier's zeros in place of the noise around them, and the largest size of the noise, (B, C, H, W).

    A rectifier has no negative entries, so that those are noise.
    """
    noise = (-solution.maps).clamp_min(0).max().expand_as(solution.maps)
    return torch.where(solution.maps > ZERO_SLACK * noise, solution.maps, 0), noise
