"""Which position of its input a convolution reads for each output and each offset of its kernel, and what order tells all positions.

The gradient at offset o is G_o = Dᵀ S_o A, and S_o holds a one where an output position reads an input position. Positions of one side,
the inputs' or the outputs', are the unknowns of a walk; those of the other side are its targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import pad

from dosimeter.network.convolving import MODES

Side = Literal["inputs", "outputs"]
MOST_PLANNED = 1024  # positions of a grid that is worth a plan: as many channels would have to hold one sample
LEAST_EIGENVALUE = 1e-6  # of the squares of zeros and ones
SOME_WAVE = (0.7, 1.9)  # angles a row and a column of a wave that no grid treats apart


@dataclass(frozen=True)
class Step:
    """One position of a walk. Its vector v has R_o v = the sum of the targets' vectors, for every offset whose targets are known."""

    position: int
    offsets: tuple[int, ...]  # that tell it


@dataclass(frozen=True)
class Plan:
    """A walk over all positions, from one that certain offsets alone do not see."""

    start: int
    unseen_by: tuple[int, ...]  # offsets that drop the start, and no other position together
    steps: tuple[Step, ...]

    @property
    def fewest(self) -> int:
        """The fewest offsets that tell a position."""
        return min([len(self.unseen_by), *(len(step.offsets) for step in self.steps)])


@dataclass(frozen=True)
class Alike:
    """Two offsets that see moved copies of the same positions, in every target."""

    offset: int
    other: int
    down: int  # how much further `offset` reaches than `other`
    across: int


@dataclass(frozen=True)
class Reads:
    """S_o for one sample, for all offsets of a kernel, rows of the kernel first."""

    table: tuple[tuple[int, ...], ...]  # by offset and output position: the input position, −1 where it lies outside
    height: int  # of the input grid
    width: int
    output_height: int
    output_width: int

    @property
    def inputs(self) -> int:
        return self.height * self.width

    @property
    def outputs(self) -> int:
        return len(self.table[0])

    @property
    def all_read(self) -> bool:
        """Whether every input position is read at all."""
        return len({given for row in self.table for given in row} - {-1}) == self.inputs

    def positions(self, side: Side) -> int:
        return self.inputs if side == "inputs" else self.outputs

    def grid(self, side: Side) -> tuple[int, int]:
        return (self.height, self.width) if side == "inputs" else (self.output_height, self.output_width)

    def targets(self, side: Side) -> list[dict[int, list[int]]]:
        """For each offset: the targets of each position that has some."""
        found: list[dict[int, list[int]]] = []
        for row in self.table:
            pairs: dict[int, list[int]] = {}
            for output, given in enumerate(row):
                if given >= 0:
                    position, target = (given, output) if side == "inputs" else (output, given)
                    pairs.setdefault(position, []).append(target)
            found.append(pairs)
        return found

    def plans(self, side: Side) -> tuple[Plan, ...]:
        """Walks from one or two ends of the grid; none where no position stands out, or a walk does not reach all of them."""
        return _plans(self, side)

    def alike(self, side: Side) -> tuple[Alike, ...]:
        """Pairs of offsets that tell the waves over the grid; none where they leave more than the waves."""
        return _alike(self, side)

    def equations(self, side: Side) -> int:
        """The fewest offsets that tell a position, or that tell all of them at once; 0 where nothing tells them."""
        plans = self.plans(side)
        return min(plan.fewest for plan in plans) if plans else len(self.alike(side))


@lru_cache(maxsize=256)
def reads_of(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int, int, int],
    mode: str,
    height: int,
    width: int,
) -> Reads:
    """`padding` is left, right, above, below, as torch's `pad` takes it."""
    grid = torch.arange(height * width, dtype=torch.float64).reshape(1, 1, height, width)
    options = {"value": -1.0} if mode == "zeros" else {}
    grid = pad(grid, list(padding), mode=MODES[mode], **options)[0, 0].long()
    places = [side - (size - 1) * spread for side, size, spread in zip(grid.shape, kernel, dilation)]
    table = tuple(
        tuple(
            grid[dy * dilation[0] : dy * dilation[0] + places[0] : stride[0], dx * dilation[1] : dx * dilation[1] + places[1] : stride[1]]
            .flatten()
            .tolist()
        )
        for dy in range(kernel[0])
        for dx in range(kernel[1])
    )
    down, across = (-(-side // step) for side, step in zip(places, stride))
    return Reads(table=table, height=height, width=width, output_height=down, output_width=across)


def reads_of_module(module: nn.Conv2d | nn.Linear, height: int, width: int) -> Reads:
    if isinstance(module, nn.Linear):
        return reads_of((1, 1), (1, 1), (1, 1), (0, 0, 0, 0), "zeros", height, width)
    kernel, stride, dilation = ((pair[0], pair[1]) for pair in (module.kernel_size, module.stride, module.dilation))
    left, right, above, below = module._reversed_padding_repeated_twice  # what torch itself pads with
    return reads_of(kernel, stride, dilation, (left, right, above, below), module.padding_mode, height, width)


def freedom(module: nn.Conv2d, height: int, width: int) -> int:
    """How many independent ways to rearrange one map leave all its shifts as they are: the dimension of {(X, Y) : S_o Y = X S_o for all o}.

    Y A and X⁻ᵀ D then have the gradient of A and D. At 1 the gradient determines the maps up to a mixing of the samples (the guide has
    the proof). Rows and columns are apart: the shifts of a grid are products of theirs, and so are the ways.
    """
    left, right, above, below = module._reversed_padding_repeated_twice
    count = 1
    for axis, side, padding in ((0, height, (0, 0, above, below)), (1, width, (0, 0, left, right))):
        kernel, stride, dilation = ((pair[axis], 1) for pair in (module.kernel_size, module.stride, module.dilation))
        count *= _freedom_along(reads_of(kernel, stride, dilation, padding, module.padding_mode, side, 1))
    return count


@lru_cache(maxsize=256)
def _freedom_along(reads: Reads) -> int:
    operators = [_operator(row, reads, "inputs") for row in reads.table]
    own, other = torch.eye(reads.inputs, dtype=torch.float64), torch.eye(reads.outputs, dtype=torch.float64)
    system = torch.cat([torch.cat([torch.kron(one, own), -torch.kron(other, one.T.contiguous())], 1) for one in operators])
    return system.shape[1] - int((torch.linalg.eigvalsh(system.T @ system) > LEAST_EIGENVALUE).sum())


@lru_cache(maxsize=256)
def _plans(reads: Reads, side: Side) -> tuple[Plan, ...]:
    count = reads.positions(side)
    if count > MOST_PLANNED:
        return ()
    targets = reads.targets(side)
    seen_by = [frozenset(offset for offset, pairs in enumerate(targets) if position in pairs) for position in range(count)]
    kinds = set(seen_by)
    alone = [
        position
        for position, offsets in enumerate(seen_by)
        if offsets and not any(other <= offsets for other in kinds - {offsets}) and seen_by.count(offsets) == 1
    ]
    whole = _Determined(reads, side)
    found = (_plan(targets, seen_by, start, whole) for start in dict.fromkeys(alone[:1] + alone[-1:]))
    return tuple(plan for plan in found if plan is not None)


@lru_cache(maxsize=256)
def _alike(reads: Reads, side: Side) -> tuple[Alike, ...]:
    count, (_, width) = reads.positions(side), reads.grid(side)
    if count > MOST_PLANNED:
        return ()
    first: dict[frozenset[int], tuple[int, dict[int, int]]] = {}  # by the targets that offsets see: an offset and its positions
    found = []
    for offset, pairs in enumerate(reads.targets(side)):
        seen = {told[0]: position for position, told in pairs.items()}
        if not seen or any(len(told) > 1 for told in pairs.values()):
            continue
        other, before = first.setdefault(frozenset(seen), (offset, seen))
        apart = {(seen[target] // width - before[target] // width, seen[target] % width - before[target] % width) for target in seen}
        if other != offset and len(apart) == 1:
            found.append(Alike(offset, other, *apart.pop()))
    return tuple(found) if _tell_waves(reads, side, found) else ()


def _tell_waves(reads: Reads, side: Side, pairs: Sequence[Alike]) -> bool:
    """Whether a wave is all that the pairs see alike: for one sample, R_o x = z^d R_o' x has one solution."""
    if not pairs:
        return False
    operators = {index: _operator(reads.table[index], reads, side) for one in pairs for index in (one.offset, one.other)}
    system = []
    for one in pairs:
        angle = one.down * SOME_WAVE[0] + one.across * SOME_WAVE[1]
        system.append(operators[one.offset] - complex(math.cos(angle), math.sin(angle)) * operators[one.other])
    stacked = torch.cat(system)
    return int((torch.linalg.eigvalsh(stacked.mH @ stacked) > LEAST_EIGENVALUE).sum()) == reads.positions(side) - 1


class _Determined:
    """Whether a position's vector follows from what some offsets say of it: their S_o, stacked, drop no mixture of positions."""

    def __init__(self, reads: Reads, side: Side) -> None:
        self.operators = [_operator(row, reads, side) for row in reads.table]
        self.known: dict[tuple[int, ...], bool] = {}

    def __call__(self, offsets: tuple[int, ...]) -> bool:
        if offsets not in self.known:
            normal = sum((self.operators[offset].T @ self.operators[offset] for offset in offsets), torch.zeros(()))
            self.known[offsets] = bool(offsets) and float(torch.linalg.eigvalsh(normal)[0]) > LEAST_EIGENVALUE
        return self.known[offsets]


def _operator(row: Sequence[int], reads: Reads, side: Side) -> torch.Tensor:
    """S_o (H'·W', H·W), or its transpose where the outputs are the unknowns."""
    operator = torch.zeros(reads.outputs, reads.inputs, dtype=torch.float64)
    seen = [(output, given) for output, given in enumerate(row) if given >= 0]
    if seen:
        operator[tuple(torch.tensor(seen).T)] = 1
    return operator if side == "inputs" else operator.T


def _plan(targets: Sequence[dict[int, list[int]]], seen_by: Sequence[frozenset[int]], start: int, whole: _Determined) -> Plan | None:
    """The walk row by row from `start`, towards larger positions or towards smaller ones."""
    count = len(seen_by)
    order = [*range(start, count), *range(start)] if start < count / 2 else [*range(start, -1, -1), *range(start + 1, count)]
    known: set[int] = set()
    steps = []
    for position in order:
        usable = tuple(offset for offset, pairs in enumerate(targets) if known.issuperset(pairs.get(position, ())))
        if position != start:
            if not whole(usable):
                return None
            steps.append(Step(position=position, offsets=usable))
        for offset in seen_by[position]:
            new = [target for target in targets[offset][position] if target not in known]
            if len(new) == 1:
                known.add(new[0])
    unseen = tuple(offset for offset in range(len(targets)) if offset not in seen_by[start])
    return Plan(start=start, unseen_by=unseen, steps=tuple(steps)) if unseen else None
