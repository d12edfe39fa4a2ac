"""The maps of a whole batch, up to one mixing of its samples, from the gradient of one convolution.

The gradient at kernel offset o is G_o = Dᵀ S_o A. A (n, in) holds the layer's inputs at all positions of the batch, D (n', out) the
slopes behind the layer. S_o says which input position each output position reads at offset o; what lies outside of the grid is dropped.
Where the rows of A are independent, the common row space of the G_o is that of A. In its coordinates a position q is a vector v_q, and
R_o v_q is the sum of the vectors u_p of the outputs p that read q at offset o. Where the rows of D are independent instead, the same holds
with the roles of inputs and outputs exchanged, and A follows from D by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dosimeter.engines.shifts.waves import spread_waves
from dosimeter.engines.subspace.spectrum import NOISE_SLACK, ROUNDING_SLACK, noise_edge
from dosimeter.linear_fit import linear_fit
from dosimeter.network.reads import Plan, Reads, Side

T = TypeVar("T")
SIDES: tuple[Side, ...] = ("inputs", "outputs")

LEAST_GAP = 10.0  # between the last singular value of the signal and the first of the noise
CLEAR_GAP = 100.0  # behind which a value near the edge is rounding too
STRUCTURED_ROUNDING = 4.0  # rounding errors of one sign add up to more than white noise does
LEAST_TAIL = 12  # singular values that must look like white noise, where nothing is known of the noise
DECOMPOSITION_SLACK = 20.0  # rounding units of the largest singular value
LEAST_CORNER_GAP = 10.0  # between the corners' kernel and the rest
SPARE_EQUATIONS = 1.2  # equations of a position's vector over its unknowns, at least


@dataclass(frozen=True, kw_only=True)
class Rank:
    """How many positions a gradient holds, and how clearly that shows."""

    positions: int  # n = B·H·W, on the side that is read
    left: int  # independent rows on the other side: n − 1 slopes behind a batch norm in train mode, which sum to zero
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
    corner_gap: float  # singular values around the kernel that the layout begins with: of the shifts that drop a corner, or of waves
    side: Side = "inputs"  # whose positions were told apart


class NoLayout(ValueError):
    """Why a gradient does not show its maps: too many positions, no gap in its spectrum, or no grid."""


def read_rank(gradient: Tensor, reads: Reads, *, unit: float, noise: float = 0.0, batch_size: int | None = None) -> Rank:
    """How many positions a layer's gradient (out, in, k, k) holds; refuses where its spectrum does not show it."""
    return _first(lambda side: _rank_of(gradient, reads, side, unit=unit, noise=noise, batch_size=batch_size), reads)[1]


def read_layout(gradient: Tensor, reads: Reads, *, unit: float, noise: float = 0.0, batch_size: int | None = None) -> Layout:
    """(out, in, k, k) -> the maps of the layer's input.

    Two walks begin at opposite corners where both stand out. Their errors grow away from where they begin, so each position takes more
    from the nearer one. Where one corner stands out, the second walk takes the gradient with more noise of the size that it has.
    """
    return _first(lambda side: _layout_of(gradient, reads, side, unit=unit, noise=noise, batch_size=batch_size), reads)


def _first(read: Callable[[Side], T], reads: Reads) -> T:
    """What the inputs' side shows, else the outputs' side; where neither does, the refusal of the first that could have."""
    refusals = []
    for side in SIDES:
        try:
            return read(side)
        except NoLayout as refusal:
            refusals.append(refusal)
    able = [refusal for refusal, side in zip(refusals, SIDES) if reads.equations(side)]
    raise (able or refusals)[0]


def _rank_of(
    gradient: Tensor, reads: Reads, side: Side, *, unit: float, noise: float, batch_size: int | None
) -> tuple[Tensor, Rank, _Spectrum]:
    """The float64 gradient with the unknowns' side last, its rank and its spectrum."""
    area, single = reads.positions(side), reads.inputs == reads.outputs == 1
    if single and side == "outputs":
        raise NoLayout("a grid of one position has one side")
    gradient = gradient.to(torch.float64) if side == "inputs" else gradient.to(torch.float64).transpose(0, 1)
    check_capacity(gradient, area, min(gradient.shape[:2]) if single else gradient.shape[1], batch_size)
    if not single and not reads.equations(side):
        raise NoLayout("no position stands out that certain offsets of the kernel alone would drop")
    spectrum = _Spectrum.of(gradient)
    rank = find_rank(spectrum, gradient, area, unit=unit, noise=noise, batch_size=batch_size)
    equations = rank.left if single else rank.left * reads.equations(side) / SPARE_EQUATIONS
    if equations < (rank.positions - 1 if single else rank.positions):
        other = "slopes behind" if side == "inputs" else "inputs of"
        raise NoLayout(f"the {other} the layer have rank {rank.left}, too few for {rank.positions} positions")
    return gradient, rank, spectrum


def _layout_of(gradient: Tensor, reads: Reads, side: Side, *, unit: float, noise: float, batch_size: int | None) -> Layout:
    turned, rank, spectrum = _rank_of(gradient, reads, side, unit=unit, noise=noise, batch_size=batch_size)
    if reads.inputs == reads.outputs == 1:
        return _single_position(spectrum, rank)
    plans = reads.plans(side) or (None,)
    first, corner_gap = _spread(turned, spectrum, rank, reads, side, plans[0])
    if len(plans) == 1:
        rng = torch.Generator(device=turned.device).manual_seed(0)
        turned = turned + rank.noise * torch.randn(turned.shape, generator=rng, dtype=turned.dtype, device=turned.device)
        spectrum = _Spectrum.of(turned)
    second, _ = _spread(turned, spectrum, rank, reads, side, plans[-1])
    if side == "outputs":
        first, second = (_inputs_of(gradient.to(first), reads, slopes) for slopes in (first, second))
    second = _in_mixing_of(first, second)
    ahead = 1.0 if len(plans) == 1 else 0.0
    nearer = torch.linspace(1, ahead, first.shape[1], dtype=first.dtype, device=first.device)[None, :, None]
    nearer = nearer if side == "inputs" or len(plans) == 1 else torch.full_like(nearer, 0.5)
    return Layout(maps=nearer * first + (1 - nearer) * second, disagreement=first - second, rank=rank, corner_gap=corner_gap, side=side)


def _inputs_of(gradient: Tensor, reads: Reads, slopes: Tensor) -> Tensor:
    """The inputs (B, H·W, in) that belong to slopes (B, H'·W', out), by least squares over all offsets."""
    samples, wanted = len(slopes), gradient.permute(2, 3, 0, 1).flatten(0, 2)  # (k·k·out, in)
    table = torch.tensor(reads.table, device=slopes.device)  # (k·k, H'·W')
    read = slopes.new_zeros(len(table), samples, reads.inputs + 1, slopes.shape[2])  # the last position takes what lies outside
    places = torch.where(table >= 0, table, reads.inputs)[:, None, :, None].expand(-1, samples, -1, slopes.shape[2])
    read.scatter_add_(2, places, slopes[None].expand(len(table), -1, -1, -1))
    system = read[:, :, :-1].flatten(1, 2).transpose(1, 2).flatten(0, 1)  # (k·k·out, B·H·W)
    return torch.linalg.lstsq(system, wanted, driver="gels").solution.reshape(samples, reads.inputs, -1)  # noqa: TID251


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


def check_capacity(gradient: Tensor, area: int, room: int, batch_size: int | None) -> None:
    """Refuse a layer whose channels are fewer than the positions, which shapes alone tell."""
    outputs, inputs = gradient.shape[:2]
    if area > room:
        raise NoLayout(f"one map has {area} positions, more than the {room} that this layer's channels can hold")
    if batch_size is not None and batch_size * area > room:
        raise NoLayout(
            f"{batch_size} samples have {batch_size * area} positions, and a gradient of {inputs} by {outputs} channels holds at most "
            f"{room}"
        )


def find_rank(spectrum: _Spectrum, gradient: Tensor, area: int, *, unit: float, noise: float, batch_size: int | None) -> Rank:
    """The number of positions, a multiple of the grid's area; refuses where the spectrum does not show one.

    Entries were rounded to `unit`, relative, and have added noise of the standard deviation `noise`.
    """
    outputs, inputs = gradient.shape[:2]
    most = inputs // area
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
        one_short = (above + 1) % area == 0 if area > 1 else above + 1 == batch_size
        short = "; one short, as behind a batch norm in train mode, where slopes sum to zero" if one_short else ""
        raise NoLayout(f"{above} directions stand above the noise, not {expected}{short}")
    dropped = float(values[above] / values[0]) if above < len(values) else 0.0
    kept = float(values[above - 1] / values[0])
    if kept < LEAST_GAP * dropped:
        raise NoLayout(f"no gap in the spectrum behind {above} directions: {kept:.2g} and then {dropped:.2g} of the largest")
    left_edge = noise_edge(spoilt, gradient.numel() // outputs, outputs)
    left_rank = min(int((left > left_edge).sum()), above)
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


def _spread(gradient: Tensor, spectrum: _Spectrum, rank: Rank, reads: Reads, side: Side, plan: Plan | None) -> tuple[Tensor, float]:
    """What follows from the corners along a plan, or without one from waves: (B, positions, channels), and the gap of the kernel."""
    n, area = rank.positions, reads.positions(side)
    values, right = spectrum.right_values[:n], spectrum.right[:n]
    left = spectrum.left[:, : rank.left].T  # not whitened: every row has the same noise
    along = right.T / values * values[0]  # (channels, n)
    moved = [left @ offset @ along for offset in gradient.flatten(2).unbind(2)]  # R_o (r, n)
    if plan is None:
        basis, gap = spread_waves(moved, reads, side, n // area)
        if gap < LEAST_CORNER_GAP:
            raise NoLayout("the shifts of the kernel show no waves: the gradient is not that of such a grid")
    else:
        corner, gap = _corners(moved, plan, n // area)
        place = _walk(moved, corner, reads.targets(side), plan)
        basis = torch.cat([place[position] for position in range(area)], 1)  # (n, n): position by position, B columns each
    maps, failed = torch.linalg.solve_ex(basis, (values / values[0])[:, None] * right)  # (positions·B, channels)
    if bool(failed):
        raise NoLayout("the walk over the grid finds the same vectors at several positions")
    return maps.reshape(area, n // area, -1).transpose(0, 1).contiguous(), gap


def _corners(moved: Sequence[Tensor], plan: Plan, samples: int) -> tuple[Tensor, float]:
    """The start of the plan in all samples: what the offsets that do not see it drop. (n, B) and the kernel's gap."""
    sizes, right = _right_singular(torch.cat([moved[offset] for offset in plan.unseen_by]))
    n = right.shape[1]
    if len(sizes) < n:
        raise NoLayout("the offsets that drop a corner have too few equations to tell it")
    gap = float(sizes[n - samples - 1] / sizes[n - samples]) if samples < n else math.inf
    if gap < LEAST_CORNER_GAP:
        raise NoLayout("the shifts of the kernel show no corner: the gradient is not that of such a grid")
    return right[n - samples :].T, gap


def _walk(moved: Sequence[Tensor], corner: Tensor, targets: Sequence[dict[int, list[int]]], plan: Plan) -> dict[int, Tensor]:
    """Every position's vectors (n, B), each by least squares from the targets that are known and from the offsets that drop it."""
    square = [operator.T @ operator for operator in moved]
    place = {plan.start: corner}
    sums: dict[int, Tensor] = {}  # of all that is known of a target's vector
    counts: dict[int, int] = {}
    factors: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}

    def learn(position: int) -> None:
        for operator, pairs in zip(moved, targets):
            unknown = [target for target in pairs.get(position, ()) if target not in sums]
            if len(pairs.get(position, ())) == 1 or len(unknown) == 1:
                target = unknown[0] if unknown else pairs[position][0]
                others = [sums[other] / counts[other] for other in pairs[position] if other != target]
                sums[target] = sums.get(target, 0) + operator @ place[position] - sum(others)
                counts[target] = counts.get(target, 0) + 1

    learn(plan.start)
    for step in plan.steps:
        right_side, weights = torch.zeros_like(corner), []
        for offset in step.offsets:
            told = targets[offset].get(step.position, [])
            weight = min([counts[target] for target in told], default=1)  # as often as it is known
            weights.append((offset, weight))
            if told:
                right_side = right_side + weight * moved[offset].T @ sum(sums[target] / counts[target] for target in told)
        kind = tuple(weights)
        if kind not in factors:
            factors[kind] = _scaled_factor(sum((weight * square[offset] for offset, weight in kind), torch.zeros_like(square[0])))
        scale, triangle = factors[kind]
        place[step.position] = scale[:, None] * torch.cholesky_solve(scale[:, None] * right_side, triangle)
        learn(step.position)
    return place


def _scaled_factor(normal: Tensor) -> tuple[Tensor, Tensor]:
    """A Cholesky factor after scaling to a unit diagonal, and that scaling."""
    scale = normal.diagonal().rsqrt()
    scaled = scale[:, None] * normal * scale
    return scale, torch.linalg.cholesky(scaled + 4 * torch.finfo(normal.dtype).eps * len(normal) * torch.eye(len(normal)).to(normal))


def _in_mixing_of(maps: Tensor, others: Tensor) -> Tensor:
    """`others`, which is the same up to a mixing of its samples, in the mixing of `maps`."""
    flat, rest = maps.flatten(1).T, others.flatten(1).T  # (H·W·in, B)
    return (rest @ linear_fit(rest, flat)).T.reshape(maps.shape)
