"""Doubtful entries of rectifiers, settled by the residual of the least squares below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.engines.downward.equations import Solution, SolvedClass, solve_input
from dosimeter.engines.downward.layers import Layer, as_grid
from dosimeter.engines.downward.slopes import Backward

MOST_FLIPS = 60
MOST_TRIED = 3  # flips that are tried, best first
MOST_SUSPECT, MOST_DOUBTFUL = 384, 64  # candidates of one gate that are judged together
RIDGE = 1e-6  # of the candidates' equations, in units of one candidate's
SHARES = (0.5, 1.5)  # of a flip, between which an entry counts as wrong
LEAST_SIZE = 0.03  # of the largest wrong entry's square, below which others wait where norms have statistics of their own
CHANNELS_AT_ONCE = 32  # of the input, in products of candidates
LEAST_DEVIATIONS = 4.0  # of a share from 0, in units of its deviation
LEAST_GAINS = (0.95, 0.99)  # shares of the misfit that a flip must bring it below: clear ones first, then one of many

Flip = tuple[int, int]  # a gate and its entry
Estimates = Mapping[int, Tensor]  # of outputs of layers on whose own values the slopes depend


def settle(backward: Backward, layers: Sequence[Layer], value: int, tolerance: float) -> tuple[Solution, int]:
    """Solve for the input of `layers`; correct one rectifier's entry after the other as long as that explains more of the gradients."""
    solution, flips = solve(backward, layers, value, {}), 0
    while flips < MOST_FLIPS and solution.misfit > tolerance and bool(solution.solved.any()):
        flipped = flip_together(backward, layers, solution, {})
        better = solve(backward, layers, value, {}) if flipped else solution
        if not better.misfit < LEAST_GAINS[0] * solution.misfit:
            undo(backward, flipped)
            flipped = [(value, 0)]
            better = flip_one(backward, layers, value, solution, {})
        if better is None:
            break
        solution, flips = better, flips + len(flipped)
    return solution, flips


def flip_together(backward: Backward, layers: Sequence[Layer], solution: Solution, at: Estimates) -> list[Flip]:
    """Flip the entries that together explain what is left, and say which ones.

    Small errors hide behind large ones, so that no single flip tells them. So every candidate has an unknown share of its flip, and least
    squares over all of them at once gives 1 for wrong entries and 0 for others.
    """
    columns = _candidates(backward, _gains(backward, layers, solution, at))
    while columns:
        wrong = _wrong(columns, solution).split([len(one.entries) for one in columns])
        chosen = [replace(one, entries=one.entries[those]) for one, those in zip(columns, wrong, strict=True)]
        done = all(bool(those.all()) for those in wrong)
        columns = [one for one in chosen if len(one.entries)]
        if done:
            break
    if at and columns:
        largest = max(float(one.sizes.max()) for one in columns)
        columns = [replace(one, entries=one.entries[one.sizes >= LEAST_SIZE * largest]) for one in columns]
    flips = [flip for one in columns for flip in one.flips]
    undo(backward, flips)
    return flips


def undo(backward: Backward, flips: Sequence[Flip]) -> None:
    """A flip undoes itself."""
    for flip in flips:
        backward.flip(*flip)


def flip_one(backward: Backward, layers: Sequence[Layer], value: int, solution: Solution, at: Estimates) -> Solution | None:
    """The solution after a flip that explains much of what is left; None where no flip explains more."""
    gains = _gains(backward, layers, solution, at)
    suspect, doubtful = (_best_flips(backward, gains, one) for one in (True, False))
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


@dataclass(frozen=True, kw_only=True)
class _Gains:
    """What each flip of one gate explains of what is left of one layer's gradient, (B, out, h, w) all."""

    layer: Layer
    gate: int
    change: Tensor  # δ, of the slope at the entry's place
    products: Tensor  # ⟨R, p⟩
    size: Tensor  # ‖δ (1 − P) p‖²
    gain: Tensor  # how much the residual's square falls


def _gains(backward: Backward, layers: Sequence[Layer], solution: Solution, at: Estimates) -> list[_Gains]:
    """What each flip explains.

    Let an entry change the slope at its place by δ, and let p be the patch of the input there. Then the residual R of the gradient becomes
    R − δ (1 − P) p, with P the projection on what the slopes explain. Its square falls by 2 δ ⟨R, p⟩ − δ² ‖(1 − P) p‖². The products ⟨R, p⟩
    at all places are the layer's convolution with R as its kernel.
    """
    found = []
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
        size = change.square() * _unexplained(layer, solution).reshape_as(change)
        gain = 2 * change * products - size
        found.append(_Gains(layer=layer, gate=number, change=change, products=products, size=size, gain=gain))
    return found


def _best_flips(backward: Backward, gains: Sequence[_Gains], suspect: bool) -> list[Flip]:
    """The entries whose opening or closing explains most of what is left of the gradients, best first; suspect or doubtful ones."""
    found: list[tuple[float, int, int]] = []
    for one in gains:
        gate = backward.gates[one.gate]
        gain = torch.where(as_grid(gate.suspect if suspect else gate.doubtful), one.gain, -torch.inf)
        highest = gain.flatten().topk(min(MOST_TRIED, gain.numel()))
        found += [(size, one.gate, entry) for size, entry in zip(highest.values.tolist(), highest.indices.tolist()) if size > 0]
    return [(number, entry) for _, number, entry in sorted(found, reverse=True)[:MOST_TRIED]]


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The changes v = δ (1 − P) p of the residual by several entries of one gate, one column each."""

    gains: _Gains
    entries: Tensor  # (K,)

    @property
    def flips(self) -> list[Flip]:
        return [(self.gains.gate, entry) for entry in self.entries.tolist()]

    @property
    def sizes(self) -> Tensor:
        return self.gains.size.flatten()[self.entries]

    @property
    def channels(self) -> Tensor:
        return self.entries // self.gains.change[0, 0].numel() % self.gains.change.shape[1]

    def patches(self, maps: Tensor) -> Tensor:
        """δ p for each entry: (K, in, k·k)"""
        positions = self.gains.change[0, 0].numel()
        samples, places = self.entries // self.gains.change[0].numel(), self.entries % positions
        every = self.gains.layer.patches(maps)  # (B, in·k·k, positions)
        return (every[samples, :, places] * self.gains.change.flatten()[self.entries, None]).unflatten(1, (maps.shape[1], -1))

    def right(self) -> Tensor:
        """⟨R, v⟩: the residual R has no part that the slopes explain."""
        return (self.gains.change * self.gains.products).flatten()[self.entries]


def _candidates(backward: Backward, gains: Sequence[_Gains]) -> list[_Columns]:
    """The entries among the suspect ones, and among the doubtful ones, that explain most by themselves."""
    found = []
    for one in gains:
        gate = backward.gates[one.gate]
        chosen = [
            torch.where(as_grid(among), one.gain, -torch.inf).flatten().topk(min(most, int(among.sum()))).indices
            for among, most in ((gate.suspect, MOST_SUSPECT), (gate.doubtful, MOST_DOUBTFUL))
        ]
        entries = torch.cat(chosen).unique()
        if len(entries):
            found.append(_Columns(gains=one, entries=entries))
    return found


def _wrong(columns: Sequence[_Columns], solution: Solution) -> Tensor:
    """Which entries' changes, at about their full size, explain more of what is left than chance does."""
    gram, right = _normal_equations(columns, solution)
    unit = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    inverse = unit[:, None] * torch.linalg.inv(unit[:, None] * gram * unit + RIDGE * torch.eye(len(gram)).to(gram)) * unit
    shares = inverse @ right
    squares = sum(float(left.square().sum()) for left in solution.residuals.values())
    equations = sum(left.numel() for left in solution.residuals.values())
    deviations = (max(squares - float(shares @ right), 0.0) / equations * inverse.diagonal()).sqrt()
    return (shares > SHARES[0]) & (shares < SHARES[1]) & (shares > LEAST_DEVIATIONS * deviations)


def _normal_equations(columns: Sequence[_Columns], solution: Solution) -> tuple[Tensor, Tensor]:
    """⟨v_i, v_j⟩ = δ_i δ_j (⟨p_i, p_j⟩ − p_iᵀ P p_j), where the first part is there for entries of one channel only; and ⟨R, v⟩."""
    each = [one.patches(solution.maps) for one in columns]
    plain = torch.block_diag(
        *(
            patches.flatten(1) @ patches.flatten(1).T * (one.channels[:, None] == one.channels)
            for one, patches in zip(columns, each, strict=True)
        )
    )
    inputs = range(solution.maps.shape[1])
    for part in solution.classes:
        for some in [slice(first, first + CHANNELS_AT_ONCE) for first in inputs[::CHANNELS_AT_ONCE]]:
            carried = torch.cat([_carried(one, patches[:, some], part) for one, patches in zip(columns, each, strict=True)])
            plain = plain - carried @ carried.T
    return plain, torch.cat([one.right() for one in columns])


def _carried(columns: _Columns, patches: Tensor, part: SolvedClass) -> Tensor:
    """The part of the patches that one class of positions explains, in an orthonormal basis: (K, in·n)."""
    found = patches.new_zeros(len(patches), patches.shape[1], len(part.factor))
    for output, offset, rows in part.blocks:
        if output == columns.gains.layer.output:
            found = found + patches[:, :, offset, None] * rows[columns.channels][:, None]
    return torch.linalg.solve_triangular(part.factor, found.flatten(0, 1).T, upper=False).T.reshape(len(patches), -1)


def _unexplained(layer: Layer, solution: Solution) -> Tensor:
    """‖(1 − P) p‖² for the patch p at every place and each output channel: (B, out, positions)."""
    samples, channels = solution.maps.shape[:2]
    patches = layer.patches(solution.maps).reshape(samples, channels, -1, layer.patches(solution.maps[:1]).shape[-1])  # (B, in, k·k, q)
    products = torch.einsum("bcaq,bcdq->bqad", patches, patches)
    absorbed = torch.einsum("oad,bqad->boq", solution.leverage(layer), products)
    return products.diagonal(dim1=2, dim2=3).sum(-1)[:, None] - absorbed


def grid_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    return (shape[0], shape[1], shape[2], shape[3]) if len(shape) == 4 else (shape[0], shape[1], 1, 1)
