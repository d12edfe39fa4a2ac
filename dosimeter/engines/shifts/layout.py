"""The maps of a whole batch, up to one mixing of its samples, from the gradient of one convolution.

The gradient at kernel offset o is G_o = Dᵀ S_o A. A (n, in) holds the layer's inputs at all n = B·H·W positions of the batch, D (n, out)
the slopes behind the layer. S_o shifts the grid by o and drops what leaves it. Where n is at most the number of channels on either side,
the common row space of the G_o is that of A. In its coordinates a position q is a vector v_q, and R_o v_q = R_c v_(q−o), with c the centre.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.subspace.spectrum import NOISE_SLACK, ROUNDING_SLACK, noise_edge

Offset = tuple[int, int]

CENTRE: Offset = (0, 0)
LEAST_GAP = 10.0  # between the last singular value of the signal and the first of the noise
CLEAR_GAP = 100.0  # behind which a value near the edge is rounding too
STRUCTURED_ROUNDING = 4.0  # rounding errors of one sign add up to more than white noise does
LEAST_TAIL = 12  # singular values that must look like white noise, where nothing is known of the noise
DECOMPOSITION_SLACK = 20.0  # rounding units of the largest singular value
LEAST_CORNER_GAP = 10.0  # between the corners' kernel and the rest


@dataclass(frozen=True, kw_only=True)
class Rank:
    """How many positions a gradient holds, and how clearly that shows."""

    positions: int  # n = B·H·W
    left: int  # n, or n − 1 behind a batch norm in train mode, whose slopes sum to zero
    largest: float  # singular value
    smallest_kept: float  # singular value, over the largest
    largest_dropped: float  # singular value, over the largest; 0 where none is left
    noise: float  # standard deviation of one entry of the gradient

    @property
    def gap(self) -> float:
        return self.smallest_kept / self.largest_dropped if self.largest_dropped else math.inf


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A batch's maps in their spatial order, up to one mixing matrix of the samples."""

    maps: Tensor  # (B, H·W, in)
    disagreement: Tensor  # (B, H·W, in) between the maps spread from opposite corners, in the same mixing
    rank: Rank
    corner_gap: float  # singular values around the kernel of the shifts that drop a corner


class NoLayout(ValueError):
    """Why a gradient does not show its maps: too many positions, no gap in its spectrum, or no grid."""


def read_rank(gradient: Tensor, area: int, *, unit: float, noise: float = 0.0, batch_size: int | None = None) -> Rank:
    """How many positions a layer's gradient (out, in, k, k) holds; refuses where its spectrum does not show it."""
    check_capacity(gradient, area, batch_size)
    gradient = gradient.to(torch.float64)
    return find_rank(_Spectrum.of(gradient), gradient, area, unit=unit, noise=noise, batch_size=batch_size)


def read_layout(gradient: Tensor, height: int, width: int, *, unit: float, noise: float = 0.0, batch_size: int | None = None) -> Layout:
    """(out, in, k, k) -> the maps of the layer's input, for an odd kernel with stride 1 that keeps the grid's size.

    Two passes spread from the top left and from the bottom right corner. Their errors grow away from where they begin,
    so each position takes more from the nearer one.
    """
    check_capacity(gradient, height * width, batch_size)
    gradient = gradient.to(torch.float64)
    spectrum = _Spectrum.of(gradient)
    rank = find_rank(spectrum, gradient, height * width, unit=unit, noise=noise, batch_size=batch_size)
    if height * width == 1:
        return _single_position(spectrum, rank)
    first, corner_gap = _spread(gradient, spectrum, rank, height, width)
    turned, _ = _spread(gradient.flip((2, 3)), spectrum, rank, height, width)  # the spaces of a turned kernel are the same
    second = _in_mixing_of(first, turned.flip(1))
    nearer = torch.linspace(1, 0, height * width, dtype=first.dtype, device=first.device)[None, :, None]
    return Layout(maps=nearer * first + (1 - nearer) * second, disagreement=first - second, rank=rank, corner_gap=corner_gap)


def _single_position(spectrum: _Spectrum, rank: Rank) -> Layout:
    """On a grid of one position there is nothing to arrange: the row space itself is the samples' mixture."""
    maps, values = spectrum.right[: rank.positions], spectrum.right_values[: rank.positions]
    rng = torch.Generator(device=maps.device).manual_seed(0)
    noise = torch.randn(maps.shape, generator=rng, dtype=maps.dtype, device=maps.device) * (rank.noise / values)[:, None]
    return Layout(maps=maps[:, None], disagreement=noise[:, None], rank=rank, corner_gap=math.inf)


@dataclass(frozen=True, kw_only=True)
class _Spectrum:
    """The common row and column spaces of a kernel's matrices G_o."""

    right_values: Tensor  # (in,) of the G_o stacked below one another
    right: Tensor  # (in, in) rows
    left_values: Tensor  # (out,) of the G_o beside one another
    left: Tensor  # (out, out) columns

    @classmethod
    def of(cls, gradient: Tensor) -> _Spectrum:
        outputs, inputs = gradient.shape[:2]
        right_values, right = _right_singular(gradient.permute(2, 3, 0, 1).reshape(-1, inputs))
        left_values, left = _right_singular(gradient.permute(1, 2, 3, 0).reshape(-1, outputs))
        return cls(right_values=right_values, right=right, left_values=left_values, left=left.T)


def _right_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors of a tall matrix, by way of its triangular factor."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = torch.linalg.qr(matrix, mode="r").R
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return values, right


def check_capacity(gradient: Tensor, area: int, batch_size: int | None) -> None:
    """Refuse a layer whose channels are fewer than the positions, which shapes alone tell."""
    outputs, inputs = gradient.shape[:2]
    if area > min(outputs, inputs):
        raise NoLayout(f"one map has {area} positions, more than the {min(outputs, inputs)} that this layer's channels can hold")
    if batch_size is not None and batch_size * area > min(outputs, inputs):
        raise NoLayout(
            f"{batch_size} samples have {batch_size * area} positions, and a gradient of {inputs} by {outputs} channels holds at most "
            f"{min(outputs, inputs)}"
        )


def find_rank(spectrum: _Spectrum, gradient: Tensor, area: int, *, unit: float, noise: float, batch_size: int | None) -> Rank:
    """The number of positions, a multiple of the grid's area; refuses where the spectrum does not show one.

    Entries were rounded to `unit`, relative, and have added noise of the standard deviation `noise`.
    """
    outputs, inputs = gradient.shape[:2]
    most = min(outputs, inputs) // area
    values, left = spectrum.right_values, spectrum.left_values
    if float(values[0]) == 0:
        raise NoLayout("the layer's gradient is zero")
    rounding = unit * float(gradient.square().mean().sqrt())
    spoilt = math.hypot(ROUNDING_SLACK * rounding, NOISE_SLACK * noise)
    rows = gradient.numel() // inputs
    edge = max(noise_edge(spoilt, rows, inputs), DECOMPOSITION_SLACK * torch.finfo(values.dtype).eps * float(values[0]))
    above, most = int((values > edge).sum()), min(most, batch_size or most)
    whole = min(above // area, most) * area
    if 0 < whole < above and values[whole] < STRUCTURED_ROUNDING * edge and values[whole - 1] > CLEAR_GAP * values[whole]:
        above = whole
    if above % area or above > most * area or above == len(values):
        above = _white_behind(values[: int(gradient.any(dim=3).any(dim=2).any(dim=0).sum())], rows, area) or above
    if above % area or not 0 < above <= most * area:
        expected = f"a whole number of {area} positions" if batch_size is None else f"the {batch_size * area} of {batch_size} samples"
        raise NoLayout(f"{above} directions stand above the noise, not {expected}")
    dropped = float(values[above] / values[0]) if above < len(values) else 0.0
    kept = float(values[above - 1] / values[0])
    if kept < LEAST_GAP * dropped:
        raise NoLayout(f"no gap in the spectrum behind {above} directions: {kept:.2g} and then {dropped:.2g} of the largest")
    left_edge = noise_edge(spoilt, gradient.numel() // outputs, outputs)
    left_rank = min(int((left > left_edge).sum()), above)
    if left_rank < above - 1:
        raise NoLayout(f"the slopes behind the layer have rank {left_rank}, fewer than its {above} positions")
    tail = values[above:]
    spare = (rows - above) * len(tail)
    noise = max(rounding / 4, noise, float((tail.square().sum() / max(spare, 1)).sqrt()))
    return Rank(positions=above, left=left_rank, largest=float(values[0]), smallest_kept=kept, largest_dropped=dropped, noise=noise)


def _white_behind(values: Tensor, rows: int, area: int) -> int:
    """The whole number of `area` positions behind which there is a gap and then white noise, however large; 0 where there is none.

    Samples that hardly differ leave a gap too. What follows it then falls in steps, as white noise does not.
    """
    for kept in range(area, len(values) - max(2 * area, LEAST_TAIL), area):
        tail = values[kept:]
        deviation = float(tail.median()) / math.sqrt(rows - kept)
        if values[kept - 1] > LEAST_GAP * tail[0] and tail[0] < NOISE_SLACK * noise_edge(deviation, rows - kept, len(tail)):
            return kept
    return 0


def _spread(gradient: Tensor, spectrum: _Spectrum, rank: Rank, height: int, width: int) -> tuple[Tensor, float]:
    """The maps that follow from the top left corners, row by row: (B, H·W, in), and the gap of the corners' kernel."""
    n, samples = rank.positions, rank.positions // (height * width)
    values, right = spectrum.right_values[:n], spectrum.right[:n]
    left = spectrum.left[:, : rank.left].T  # not whitened: every row has the same noise
    reach = gradient.shape[2] // 2, gradient.shape[3] // 2
    offsets = [(dy, dx) for dy in range(-reach[0], reach[0] + 1) for dx in range(-reach[1], reach[1] + 1)]
    along = right.T / values * values[0]  # (in, n)
    moved = {o: left @ gradient[:, :, o[0] + reach[0], o[1] + reach[1]] @ along for o in offsets}  # R_o (r, n)
    corner, gap = _corners(moved, samples)
    place = _walk_the_grid(moved, corner, height, width)
    basis = torch.cat([place[y, x] for y in range(height) for x in range(width)], 1)  # (n, n): position by position, B columns each
    maps = torch.linalg.solve(basis, (values / values[0])[:, None] * right)  # (H·W·B, in)
    return maps.reshape(height * width, samples, -1).transpose(0, 1).contiguous(), gap


def _corners(moved: dict[Offset, Tensor], samples: int) -> tuple[Tensor, float]:
    """The top left corners of the samples: what every shift towards larger y or x drops. (n, B) and the kernel's gap."""
    dropping = torch.cat([operator for offset, operator in moved.items() if offset[0] > 0 or offset[1] > 0])
    sizes, right = _right_singular(dropping)
    n = right.shape[1]
    gap = float(sizes[n - samples - 1] / sizes[n - samples]) if samples < n else math.inf
    if gap < LEAST_CORNER_GAP:
        raise NoLayout("the shifts of the kernel show no corner: the gradient is not that of such a grid")
    return right[n - samples :].T, gap


def _walk_the_grid(moved: dict[Offset, Tensor], corner: Tensor, height: int, width: int) -> dict[Offset, Tensor]:
    """Every position's vectors (n, B), each by least squares from the neighbours that are known and from those outside the grid.

    R_o v_q = R_c v_(q−o) for each known neighbour q − o, the same with the roles exchanged, and R_o v_q = 0 for each
    neighbour outside.
    """
    square = {offset: operator.T @ operator for offset, operator in moved.items()}
    onto_centre = {offset: operator.T @ moved[CENTRE] for offset, operator in moved.items()}
    place, factors = {CENTRE: corner}, {}
    for position in ((y, x) for y in range(height) for x in range(width)):
        if position == CENTRE:
            continue
        outside, known, right_side = [], [], torch.zeros_like(corner)
        for offset in moved:
            neighbour = position[0] - offset[0], position[1] - offset[1]
            if not (0 <= neighbour[0] < height and 0 <= neighbour[1] < width):
                outside.append(offset)
            elif neighbour in place:
                known.append(offset)
                opposite = -offset[0], -offset[1]
                right_side = right_side + onto_centre[offset] @ place[neighbour] + onto_centre[opposite].T @ place[neighbour]
        kind = tuple(outside), tuple(known)
        if kind not in factors:
            normal = sum(square[offset] for offset in (*outside, *known)) + len(known) * square[CENTRE]
            factors[kind] = _scaled_factor(normal)
        scale, triangle = factors[kind]
        place[position] = scale[:, None] * torch.cholesky_solve(scale[:, None] * right_side, triangle)
    return place


def _scaled_factor(normal: Tensor) -> tuple[Tensor, Tensor]:
    """A Cholesky factor after scaling to a unit diagonal, and that scaling."""
    scale = normal.diagonal().rsqrt()
    scaled = scale[:, None] * normal * scale
    return scale, torch.linalg.cholesky(scaled + 4 * torch.finfo(normal.dtype).eps * len(normal) * torch.eye(len(normal)).to(normal))


def _in_mixing_of(maps: Tensor, others: Tensor) -> Tensor:
    """`others`, which is the same up to a mixing of its samples, in the mixing of `maps`."""
    flat, rest = maps.flatten(1).T, others.flatten(1).T  # (H·W·in, B)
    return (rest @ torch.linalg.lstsq(rest, flat).solution).T.reshape(maps.shape)
