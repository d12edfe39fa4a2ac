"""The input of layers whose slopes are known, by least squares.

The gradient at kernel offset o is G_o = D_oᵀ A: A (n, in) holds the input at all n positions of the batch, D_o the slopes, moved to the
positions that offset o reads. Each channel of A is its own problem with the same matrix, and all offsets of all layers that receive the
input are stacked. So a kernel of k by k determines up to k²·out positions, where a single matrix determines out. A stride splits the
positions into classes that share no offset, and each class is solved by itself.

Behind batch norm in train mode the slopes sum to zero over the batch. A class that a single offset reads is then known up to one number a
channel. The zeros of a rectifier tell this number: they are the least entries, and many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from dosimeter.engines.downward.layers import Layer

LARGEST_CONDITION = 500.0  # of an input's equations: single precision leaves four digits
LARGEST_CONDITION_OF_PATCHES = 1e4
MOST_UNKNOWNS = 6000  # positions of one class
INVERSE_STEPS = 12  # of the power iterations for the condition
DEAD = 1e-12  # of the largest column: positions that no slope reaches
BALANCED = 1e-5  # sum of a class's slopes, relative to their norm, below which they sum to zero
LEAST = 1e-2  # over the least entry of a channel, in units of all entries' deviation, up to which a rectifier's zeros begin
FLOOR_SHARE = 16  # one entry in so many, and four at least, must be a rectifier's zeros to show where zero is


@dataclass(frozen=True, kw_only=True)
class SolvedClass:
    """Positions that share offsets, with the matrix of their equations."""

    blocks: tuple[tuple[int, int, Tensor], ...]  # the layer's output, the offset, and the equations (out, n)
    factor: Tensor  # (n, n) lower triangular, of the Gram matrix


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The input of some layers, where their gradients determine it."""

    maps: Tensor  # (B, C, H, W), 0 where not solved
    solved: Tensor  # (B, 1, H, W) bool
    reached: Tensor  # (B, 1, H, W) bool: a slope touches the position
    residuals: Mapping[int, Tensor]  # of each layer's gradient (out, in, k, k), by the layer's output
    misfit: float  # of all gradients that were solved, relative
    excess: float  # equations for each unknown, in the class that has the fewest
    condition: float  # of the worst class that was solved
    floor_spread: float  # of the zeros that show a class's zero, relative; 0 where none is needed
    reason: str  # why a class was left; "" where all are solved
    classes: tuple[SolvedClass, ...]

    def leverage(self, layer: Layer) -> Tensor:
        """How much of a change in the equations of one output channel the least squares absorbs: (out, k·k, k·k).

        With P the projection on what the slopes can explain, these are the entries of P between the offsets of the channel.
        """
        outputs, offsets = layer.gradient.shape[0], layer.gradient.shape[2] * layer.gradient.shape[3]
        found = layer.gradient.new_zeros(outputs, offsets, offsets)
        for one in self.classes:
            mine = [(offset, rows) for output, offset, rows in one.blocks if output == layer.output]
            if not mine:
                continue
            rows = torch.cat([rows for _, rows in mine])  # (offsets · out, n)
            half = torch.linalg.solve_triangular(one.factor, rows.T, upper=False).reshape(-1, len(mine), outputs)
            chosen = torch.tensor([offset for offset, _ in mine])
            found[:, chosen[:, None], chosen] = torch.einsum("nao,nbo->oab", half, half)
        return found


def solve_input(
    layers: Sequence[Layer], slopes: Mapping[int, Tensor], shape: tuple[int, int, int, int], *, rectified: bool = False
) -> Solution:
    """The input (B, C, H, W) of layers that all receive it, from their gradients and the slopes (B, out, h, w) at their outputs.

    `rectified`: the input is what a rectifier gave.
    """
    samples, channels, height, width = shape
    count = samples * height * width
    like = layers[0].gradient
    rows, wanted, places = [], [], []
    for layer in layers:
        blocks, targets = _rows(layer, slopes[layer.output], shape)
        rows += blocks
        wanted += targets
        places += [(layer, offset) for offset in range(len(blocks))]
    touched = torch.stack([block.abs().amax(0) for block in rows])  # (blocks, n)
    touched = touched > DEAD * touched.max()
    maps = like.new_zeros(count, channels)
    solved = torch.zeros(count, dtype=torch.bool, device=like.device)
    classes: list[SolvedClass] = []
    left, reasons, conditions, excesses, spreads = [block * 0 for block in wanted], [], [1.0], [torch.inf], [0.0]
    for blocks, columns in _classes(touched):
        matrix = torch.cat([rows[block][:, columns] for block in blocks])
        target = torch.cat([wanted[block] for block in blocks])
        live = matrix.abs().amax(1) > 0
        balanced = rectified and _balanced(matrix)
        answer, factor, condition, reason = _solve(*_centred(matrix[live], target[live]) if balanced else (matrix[live], target[live]))
        if answer is None:
            reasons.append(reason)
            continue
        if balanced:
            floor, spread = _floor(answer)
            answer = answer - floor
            spreads.append(spread)
        maps[columns], solved[columns] = answer, True
        conditions.append(condition)
        named = tuple((places[block][0].output, places[block][1], rows[block][:, columns]) for block in blocks)
        classes.append(SolvedClass(blocks=named, factor=factor))
        excesses.append(int(live.sum()) / len(columns))
        misses = (target - matrix @ answer).split([len(rows[block]) for block in blocks])
        for block, missed in zip(blocks, misses):
            left[block] = missed
    used = [block for block in range(len(rows)) if bool(solved[touched[block]].any())]
    size = sum(float(wanted[block].square().sum()) for block in used)
    misfit = (sum(float(left[block].square().sum()) for block in used) / size) ** 0.5 if size else torch.inf
    grid = (samples, height, width)
    return Solution(
        maps=maps.reshape(*grid, channels).permute(0, 3, 1, 2).contiguous(),
        solved=solved.reshape(grid)[:, None],
        reached=touched.any(0).reshape(grid)[:, None],
        residuals=_kernels(layers, places, left),
        misfit=misfit,
        excess=min(excesses),
        condition=max(conditions),
        floor_spread=max(spreads),
        reason="; ".join(dict.fromkeys(reasons)),
        classes=tuple(classes),
    )


def read_slopes(layer: Layer, maps: Tensor) -> Tensor | None:
    """The slopes (B, out, positions) at a layer's output from its input (B, C, H, W), by least squares: G = Dᵀ P, with P the patches.

    None where the patches are not linearly independent.
    """
    patches = layer.patches(maps)  # (B, in·k·k, positions)
    samples, _, positions = patches.shape
    rows = patches.permute(0, 2, 1).flatten(0, 1)  # (n, in·k·k)
    if len(rows) > rows.shape[1]:
        return None
    gram = rows @ rows.T
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed) or not _condition(gram, factor) < LARGEST_CONDITION_OF_PATCHES:
        return None
    flat = layer.gradient.flatten(1).T  # (in·k·k, out)
    slopes = torch.cholesky_solve(rows @ flat, factor)
    slopes = slopes + torch.cholesky_solve(rows @ (flat - rows.T @ slopes), factor)
    return slopes.reshape(samples, positions, -1).transpose(1, 2)  # (B, out, positions)


def _rows(layer: Layer, slopes: Tensor, shape: tuple[int, int, int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """For each offset of the kernel: D_oᵀ (out, n) and G_o (out, in)."""
    samples, _, height, width = shape
    count = samples * height * width
    places = torch.arange(1, count + 1, device=slopes.device, dtype=torch.float64).reshape(samples, 1, height, width)
    reads = layer.patches(places).long()  # (B, k·k, positions), 0 outside the grid
    flat = slopes.flatten(2).permute(1, 0, 2).flatten(1)  # (out, B·positions)
    blocks = []
    for offset in range(reads.shape[1]):
        block = flat.new_zeros(len(flat), count + 1)
        block[:, reads[:, offset].flatten()] = flat
        blocks.append(block[:, 1:])
    return blocks, list(layer.gradient.flatten(2).permute(2, 0, 1))


def _classes(touched: Tensor) -> list[tuple[list[int], Tensor]]:
    """Sets of blocks and the columns that they touch, no two of which share either."""
    blocks, columns = touched.nonzero(as_tuple=True)
    total = touched.shape[0] + touched.shape[1]
    links = coo_matrix((torch.ones(len(blocks)).numpy(), (blocks.cpu().numpy(), columns.cpu().numpy() + touched.shape[0])), (total, total))
    _, labels = connected_components(links, directed=False)
    labels = torch.from_numpy(labels).to(touched.device)
    of_blocks, of_columns = labels[: touched.shape[0]], labels[touched.shape[0] :]
    found = []
    for label in of_blocks[touched.any(1)].unique().tolist():
        members = (of_columns == label).nonzero()[:, 0]
        found.append(((of_blocks == label).nonzero()[:, 0].tolist(), members))
    return found


def _solve(matrix: Tensor, target: Tensor) -> tuple[Tensor | None, Tensor, float, str]:
    """Least squares by the normal equations: the answer, the factor of the Gram matrix and the condition; or why there is none."""
    nothing = matrix[:0]
    equations, unknowns = matrix.shape
    if equations < unknowns:
        return None, nothing, torch.inf, f"{unknowns} positions, more than the {equations} equations of the layers' channels and offsets"
    if unknowns > MOST_UNKNOWNS:
        return None, nothing, torch.inf, f"{unknowns} positions, more than the {MOST_UNKNOWNS} that are solved at once"
    gram = matrix.T @ matrix
    factor, failed = torch.linalg.cholesky_ex(gram)
    condition = torch.inf if int(failed) else _condition(gram, factor)
    if not condition < LARGEST_CONDITION:
        return None, nothing, condition, f"the slopes hardly determine {unknowns} positions (condition {condition:.1g})"
    answer = torch.cholesky_solve(matrix.T @ target, factor)
    answer = answer + torch.cholesky_solve(matrix.T @ (target - matrix @ answer), factor)
    return answer, factor, condition, ""


def _balanced(matrix: Tensor) -> bool:
    """Whether every equation's slopes sum to zero, so that a constant added to all positions changes nothing."""
    return float(matrix.sum(1).norm()) < BALANCED * float(matrix.norm())


def _centred(matrix: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """One more equation for every channel: its entries sum to zero."""
    count = matrix.shape[1]
    return torch.cat([matrix, matrix.new_full((1, count), float(matrix.norm()) / count)]), torch.cat([target, target[:1] * 0])


def _floor(maps: Tensor) -> tuple[Tensor, float]:
    """Where zero is in each channel of (n, C), and the widest of the ranges of entries that show it.

    A rectifier's zeros are the narrowest range with enough entries among the least. Narrower ranges elsewhere are chance.
    """
    count = max(4, len(maps) // FLOOR_SHARE)
    if len(maps) < count:
        return maps.new_zeros(maps.shape[1]), torch.inf
    ordered = maps.sort(0).values
    starts = ordered[: len(maps) - count + 1]
    least = starts - ordered[0] <= LEAST * maps.std()
    widths = torch.where(least, ordered[count - 1 :] - starts, torch.inf)
    first = widths.argmin(0)
    chosen = first + torch.arange(count, device=maps.device)[:, None]
    return ordered.gather(0, chosen).mean(0), float(widths.amin(0).max() / maps.std())


def _condition(gram: Tensor, factor: Tensor) -> float:
    """Of the matrix whose Gram matrix this is, by power iterations."""
    long = short = torch.ones(len(gram), 1, dtype=gram.dtype, device=gram.device) + torch.arange(len(gram)).to(gram)[:, None] % 7
    for _ in range(INVERSE_STEPS):
        long, short = gram @ long, torch.cholesky_solve(short, factor)
        long, short = long / long.norm(), short / short.norm()
    return float((gram @ long).norm() * torch.cholesky_solve(short, factor).norm()) ** 0.5


def _kernels(layers: Sequence[Layer], places: list[tuple[Layer, int]], left: list[Tensor]) -> dict[int, Tensor]:
    """What is left of each offset's gradient, put together as kernels (out, in, k, k)."""
    found = {}
    for layer in layers:
        offsets = torch.stack([missed for (one, _), missed in zip(places, left) if one is layer])  # (k·k, out, in)
        found[layer.output] = offsets.permute(1, 2, 0).reshape(layer.gradient.shape)
    return found
