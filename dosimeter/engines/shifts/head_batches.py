"""Samples out of their mixtures by the head's features, where batch norm in train mode ties a sample's feature to the whole batch.

The maps of the batch are C M, with M the B mixtures and C (B, B) unknown. The model behind the layer carries all of them together to the
head's inputs F, which the head's own gradient proves. Gauss-Newton solves these B·H equations for the B² unknowns, from the corners where
mixtures touch the activation's least value (`floors`). A batch norm right behind the layer hides one factor of all maps. The least value
then tells it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dosimeter.engines.shifts.floors import Floor
from dosimeter.network.tail import Tail

LARGEST_RESIDUAL = 1e-4  # of the features, relative
LARGEST_START = 0.3  # residual of the features at the corners, relative
ROUNDS = 6  # in which the derivatives are computed anew
CHORDS = 8  # steps with the same derivatives
STEP = 1e-6  # of the differences that stand for derivatives, relative
FLAT = 1e-2  # singular value of the derivatives along the maps themselves, over the largest, below which their factor counts as open
ALONG = 0.999  # cosine of a direction along the maps
ERROR_SLACK = 8.0


@dataclass(frozen=True, kw_only=True)
class HeadSamples:
    """How the samples are mixed, in their own scale, with the error that the features and the least value leave."""

    mixing: Tensor  # (B, B)
    errors: Tensor  # (B,) relative, of the maps


@dataclass(frozen=True, kw_only=True)
class JointProblem:
    """The features of the whole batch as a function of C (B, B)."""

    tail: Tail
    mixtures: Tensor  # (B, *shape) as the layer receives them

    def features(self, mixing: Tensor) -> Tensor:
        """(B, B) -> (B, H)"""
        return self.tail(torch.tensordot(mixing, self.mixtures, 1))

    def slopes(self, mixing: Tensor, here: Tensor) -> Tensor:
        """The features' derivatives by forward differences: (B·H, B²). `here` are the features at `mixing`."""
        step = STEP * float(mixing.norm(dim=1).max())
        columns = []
        for unknown in torch.eye(mixing.numel()).to(mixing):
            columns.append((self.features(mixing + step * unknown.reshape(mixing.shape)) - here).flatten() / step)
        return torch.stack(columns, 1)


def unmix_batch(problem: JointProblem, features: Tensor, bars: Tensor, starts: Tensor, floor: Floor) -> HeadSamples | None:
    """The mixing that leads to `features` (B, H), from one corner a sample; None where none does, or where several do.

    The features are known to relative `bars` (B,).
    """
    reached = problem.features(starts)
    order = linear_sum_assignment(torch.cdist(reached, features).cpu().numpy())[1]
    wanted = features[torch.from_numpy(order).to(features.device)]
    size, mixing, off = float(wanted.norm()), starts, wanted - reached
    if float(off.norm()) > LARGEST_START * size:
        return None
    decomposed = _Decomposed.of(problem.slopes(mixing, reached), mixing)
    for _ in range(ROUNDS):
        before = float(off.norm())
        mixing, off = _chords(problem, decomposed, mixing, wanted, off)
        if float(off.norm()) > before / 10:
            break
        decomposed = _Decomposed.of(problem.slopes(mixing, wanted - off), mixing)
    if float(off.norm()) > LARGEST_RESIDUAL * size:
        return None
    missed = math.hypot(ERROR_SLACK * float(off.norm()), float((bars.to(features) * features.norm(dim=1)).norm()))
    return _judge(problem, decomposed, mixing, missed, floor)


@dataclass(frozen=True, kw_only=True)
class _Decomposed:
    """Derivatives as singular vectors, without the one along the maps where the features hardly tell their factor."""

    left: Tensor  # (B·H, kept)
    values: Tensor  # (kept,)
    right: Tensor  # (kept, B²)
    factor_open: bool

    @classmethod
    def of(cls, slopes: Tensor, mixing: Tensor) -> _Decomposed:
        left, values, right = torch.linalg.svd(slopes, full_matrices=False)
        along = float((right[-1] @ mixing.flatten()).abs() / mixing.norm())
        factor_open = float(values[-1] / values[0]) < FLAT and along > ALONG
        kept = len(values) - factor_open
        least = torch.finfo(values.dtype).eps * values[0]
        return cls(left=left[:, :kept], values=values[:kept].clamp_min(least), right=right[:kept], factor_open=factor_open)

    def step(self, off: Tensor) -> Tensor:
        """The shortest solution of slopes · step = off: (B²,)."""
        return self.right.T @ ((self.left.T @ off.flatten()) / self.values)


def _chords(problem: JointProblem, decomposed: _Decomposed, mixing: Tensor, wanted: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """Steps with the same derivatives, halved where the residual would grow, as long as they lead on."""
    for _ in range(CHORDS):
        step, before = decomposed.step(off).reshape(mixing.shape), float(off.norm())
        trial = wanted - problem.features(mixing + step)
        for _ in range(3):
            if float(trial.norm()) < before:
                break
            step = step / 3
            trial = wanted - problem.features(mixing + step)
        if float(trial.norm()) >= before:
            break
        mixing, off = mixing + step, trial
        if float(off.norm()) > before / 2:
            break
    return mixing, off


def _judge(problem: JointProblem, decomposed: _Decomposed, mixing: Tensor, missed: float, floor: Floor) -> HeadSamples | None:
    """The samples' factor by the least value where the features leave it open, and what both leave of errors."""
    flat = problem.mixtures.flatten(1)
    maps = mixing @ flat
    lowest = floor.value / maps.amin(1)  # (B,) the factor is no larger than any of these
    factor, spread = float(lowest.min()), float(lowest.max() / lowest.min()) - 1
    if not 0.9 < factor < 1.1:
        return None
    of_factor = torch.zeros(())
    if decomposed.factor_open:
        mixing, of_factor = factor * mixing, torch.tensor(spread + floor.spread)
    triangle = torch.linalg.qr(flat.T, mode="r").R  # (B, B): a map's norm is that of triangle c
    solved = (decomposed.right.T / decomposed.values).reshape(*mixing.shape, -1)  # (B, B, kept)
    spreads = torch.linalg.matrix_norm(torch.einsum("ij,bjk->bik", triangle, solved), 2)  # (B,)
    errors = missed * spreads / maps.norm(dim=1)
    return HeadSamples(mixing=mixing, errors=torch.hypot(errors, of_factor.to(errors)))
