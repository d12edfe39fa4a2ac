"""The input of a layer before a norm with statistics of its own, by a fixed point.

Let z = γ x̂ + β be what the norm gives, with x̂ = (y − μ) / σ over the entries that share statistics. The slopes at y are
D = (γ ż − mean(γ ż) − x̂ mean(γ ż x̂)) / σ, with ż the slopes at z. So they depend on y, which is not known yet. But the mean of γ ż x̂ is
small, since it is one over many entries. From any y the least squares of `equations` gives an input A that is a few per cent off, and y
from this A is better. A few rounds end at an exact input, whose residual proves it.

A multiple of A gives slopes divided by the same number, and the same gradient. So A is known up to a factor: one for the batch in train
mode, one for each sample otherwise. But if the map behind the norm had a wrong factor c, all slopes are off by c, and every round
multiplies A by it. So a round tells the factor of the map above. Where a sum adds A to known values, and a known map follows, A's own
factor fits that map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.downward.equations import Solution
from dosimeter.engines.downward.layers import Layer
from dosimeter.engines.downward.norms import Freedom, freedom_before, norm_behind
from dosimeter.engines.downward.settling import LEAST_GAINS, MOST_FLIPS, Estimates, flip_one, flip_together, solve, undo
from dosimeter.engines.downward.slopes import Backward

SLACK = 10.0  # over the tolerance, where no flip explains more: errors of the maps above add up in the slopes
SLOW = 0.95  # share of the misfit before, above which rounds have ended
RECTIFIED_SIZE = 0.5**0.5  # root mean square of a rectified normal variable: of a map whose factor is not known
LARGEST_FLOOR_SPREAD = 1e-2  # of zeros that show where zero is
LINEAR = 1e-6  # relative departure of a sum from a line
LARGEST_SUM_MISFIT = 1e-2  # of a known map by a sum of others


@dataclass(frozen=True, kw_only=True)
class Consistent:
    """An input that leads to the slopes that it was solved from."""

    solution: Solution  # its maps have the size of a rectified normal variable where their factor is free
    freedom: Freedom | None
    factors: Tensor  # (B,) of the map above, which the slopes are divided by
    flips: int


def solve_consistently(backward: Backward, layers: Sequence[Layer], value: int, tolerance: float) -> Consistent | str:
    """The input of layers before norms with statistics of their own; or why there is none."""
    rng = Generator().manual_seed(0)
    like = next(iter(backward.anchors.values()))
    usable: list[Layer] = []
    at: Estimates = {}
    for layer in layers:
        guess = torch.randn(backward.tape.shape(layer.output), generator=rng, dtype=torch.float64).to(like)
        if layer.groups == 1 and norm_behind(backward.tape, layer.output) and backward.slopes(layer.output, guess) is not None:
            usable.append(layer)
            at = {**at, layer.output: guess}
    if not usable:
        return "the slopes behind it depend on maps that are not known"
    freedom = freedom_before(backward.tape, [layer.output for layer in usable])
    flips = 0
    solution, factors, at = _rounds(backward, usable, value, at, freedom)
    while bool(solution.solved.all()) and solution.misfit > tolerance and flips < MOST_FLIPS:
        flipped = flip_together(backward, usable, solution, at)
        better = _rounds(backward, usable, value, at, freedom)
        if not better[0].misfit < LEAST_GAINS[0] * solution.misfit:
            undo(backward, flipped)
            if flip_one(backward, usable, value, solution, at) is None:
                break
            flipped, better = [(value, 0)], _rounds(backward, usable, value, at, freedom)
        (solution, factors, at), flips = better, flips + len(flipped)
    if not bool(solution.solved.all()):
        return solution.reason
    if solution.misfit > SLACK * tolerance:
        return f"no choice of open rectifiers explains the gradients (misfit {solution.misfit:.1g})"
    if solution.floor_spread > LARGEST_FLOOR_SPREAD:
        return "the slopes sum to zero, and the rectifier has too few zeros to tell what they leave open"
    solution = replace(solution, maps=scaled(solution.maps, 1 / factors))
    return Consistent(solution=solution, freedom=freedom, factors=factors, flips=flips)


def fit_sum(backward: Backward, known: Mapping[int, Tensor], value: int, maps: Tensor, freedom: Freedom) -> tuple[Tensor, float] | None:
    """The factors (B,) that bring `maps` to their true size, where they are added to known values before a known map; and their misfit.

    z = f(known) + t · maps where the rectifier behind the sum is open. None where no such sum shows them.
    """
    tape = backward.tape
    for number in sorted(one for one in backward.gates if one in known and one > value):
        before = tape.operation(number).sources[0]
        given = {one: each for one, each in known.items() if one < number} | {value: maps}
        if not tape.follows_from(before, given):
            continue
        at_zero, at_one, at_two = (tape.run(given | {value: t * maps}, backward.tensors, [before])[0] for t in (0.0, 1.0, 2.0))
        change = at_one - at_zero
        if float((at_two - at_one - change).norm()) > LINEAR * float(change.norm()) or not bool(change.any()):
            continue
        gate = backward.gates[number]
        sure = gate.opened & gate.known
        wanted = torch.where(sure, gate.maps - at_zero, 0).flatten(1)
        change = torch.where(sure, change, 0).flatten(1)
        products, squares = (change * wanted).sum(1), change.square().sum(1)
        if freedom == "batch":
            products, squares = products.sum().expand_as(products), squares.sum().expand_as(squares)
        factors = products / squares.clamp_min(1e-300)
        left = (wanted - factors[:, None] * change).norm() / wanted.norm()
        if float(left) < LARGEST_SUM_MISFIT and bool((factors > 0).all()):
            return factors, float(left)
    return None


def scaled(maps: Tensor, factors: Tensor) -> Tensor:
    """Each sample (B, ...) times its factor (B,)."""
    return maps * factors.to(maps).reshape(-1, *([1] * (maps.ndim - 1)))


def _rounds(
    backward: Backward, layers: Sequence[Layer], value: int, at: Estimates, freedom: Freedom | None
) -> tuple[Solution, Tensor, Estimates]:
    """Solve, and put the outputs that follow in the place of the estimates, until the misfit falls no more.

    The solution comes with its size in units of the one before, (B,).
    """
    last, tape = torch.inf, backward.tape
    while True:
        solution = solve(backward, layers, value, at)
        if not bool(solution.solved.all()):
            return solution, torch.ones(len(solution.maps)), at
        factors = _sizes(solution.maps, freedom) / RECTIFIED_SIZE
        maps = scaled(solution.maps, 1 / factors).reshape(tape.shape(value))
        at = {layer.output: tape.operation(layer.output)({layer.source: maps}, backward.tensors) for layer in layers}
        if not solution.misfit < SLOW * last:
            return solution, factors, at
        last = solution.misfit


def _sizes(maps: Tensor, freedom: Freedom | None) -> Tensor:
    """Root mean squares (B,); of the batch where it shares a factor, and the usual ones where nothing is free."""
    squares = maps.flatten(1).square().mean(1)
    if freedom is None:
        return torch.full_like(squares, RECTIFIED_SIZE)
    return (squares if freedom == "sample" else squares.mean().expand_as(squares)).sqrt()
