"""Damped least squares (Levenberg–Marquardt) for many small problems at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

CHORD_GAIN = 0.1  # factor of the sum of squares that a step must gain, for the matrix of an earlier point to serve on
REST = 1e-8  # length of a step over that of the unknowns, below which a problem is at rest

Parts = tuple[Tensor, ...]  # what an evaluation leaves for the normal equations; each tensor has one row a problem


@dataclass(frozen=True, kw_only=True)
class Damping:
    """How the damping moves: down after a step that lowers the sum of squares, up after one that does not.

    The damping is relative: the normal matrix is scaled to a diagonal of ones before the damping is added.
    """

    first: float = 1e-3
    shrink: float = 0.05
    grow: float = 8.0
    least: float = 1e-16
    most: float = 1e4  # a problem that reaches this damping is at a minimum, or lost
    ridge: float = 1e-14  # added to the damping, so that rounding cannot make the matrix indefinite


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """Where the steps ended."""

    unknowns: Tensor  # (n, k)
    value: Tensor  # (n,) the sum of squares
    parts: Parts  # of the evaluation there


class Problem(ABC):
    """n independent least-squares problems of k unknowns each. `rows` (m,) says which of them are meant."""

    @abstractmethod
    def evaluate(self, unknowns: Tensor, rows: Tensor) -> tuple[Tensor, Parts]:
        """The sums of squares (m,) at the unknowns (m, k), and what the normal equations need besides."""

    @abstractmethod
    def normal_equations(self, unknowns: Tensor, rows: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        """JᵀJ (m, k, k) and Jᵀρ (m, k), with ρ the residuals and J their derivative."""

    def gradient(self, unknowns: Tensor, rows: Tensor, parts: Parts) -> Tensor:
        """Jᵀρ (m, k) alone, for problems where it costs much less than JᵀJ."""
        return self.normal_equations(unknowns, rows, parts)[1]

    def move(self, unknowns: Tensor, steps: Tensor) -> Tensor:
        """The unknowns after the steps: (m, k)."""
        return unknowns - steps

    def at_rest(self, unknowns: Tensor, steps: Tensor, trial: Tensor, better: Tensor) -> Tensor:
        """Which problems end here: (m,) bool. `better` (m,) says which trials are accepted.

        A singular matrix gives a step of zero, so such a problem ends.
        """
        return torch.linalg.vector_norm(steps, dim=1) <= REST * torch.linalg.vector_norm(trial, dim=1)


def minimise(
    problem: Problem, start: Tensor, damping: Damping, *, iterations: int, count_rejected: bool = True, patience: int | None = None
) -> Minimum:
    """Levenberg–Marquardt from each row of `start` (n, k) (Marquardt, SIAM J. Appl. Math. 1963).

    A problem ends at rest, at the largest damping, or after `iterations` steps; rejected steps count unless `count_rejected` is
    false. With `patience`, a problem also ends after that many accepted steps in a row that each gain less than a percent.
    """
    live = torch.arange(len(start), device=start.device)
    unknowns = start.clone()
    value, parts = problem.evaluate(start, live)
    level = torch.full((len(start),), damping.first, dtype=start.dtype, device=start.device)
    spent, idle = torch.zeros_like(live), torch.zeros_like(live)
    live = live[spent < iterations]
    system = None
    while len(live):
        if system is None:
            system = _scale_system(*problem.normal_equations(unknowns[live], live, _at(parts, live)))
        steps = _damped_steps(*system, level[live] + damping.ridge)
        trial = problem.move(unknowns[live], steps)
        trial_value, trial_parts = problem.evaluate(trial, live)
        better = trial_value < value[live]
        ended = problem.at_rest(unknowns[live], steps, trial, better)
        moved = live[better]
        idle[moved] = torch.where(trial_value[better] > 0.99 * value[moved], idle[moved] + 1, 0)
        unknowns[moved], value[moved] = trial[better], trial_value[better]
        for part, new in zip(parts, trial_parts):
            part[moved] = new[better]
        level[live] = torch.where(better, level[live] * damping.shrink, level[live] * damping.grow).clamp_min(damping.least)
        spent[live] += better | count_rejected
        ended |= (level[live] >= damping.most) | (spent[live] >= iterations)
        if patience is not None:
            ended |= idle[live] >= patience
        if len(moved) or bool(ended.any()):
            system = None  # else the same matrix serves the next damping
        live = live[~ended]
    return Minimum(unknowns=unknowns, value=value, parts=parts)


def minimise_by_chords(problem: Problem, start: Tensor, damping: Damping, *, iterations: int, matrices: int) -> Minimum:
    """The same for problems whose matrix JᵀJ costs much more than their gradient: a matrix serves as long as its steps gain `CHORD_GAIN`.

    A problem ends as in `minimise`, or where it would need more than so many `matrices`.
    """
    live = torch.arange(len(start), device=start.device)
    unknowns = start.clone()
    value, parts = problem.evaluate(start, live)
    normal = start.new_zeros(len(start), start.shape[1], start.shape[1])
    level = torch.full((len(start),), damping.first, dtype=start.dtype, device=start.device)
    spent, used = torch.zeros_like(live), torch.zeros_like(live)  # steps tried, and matrices
    due, moved_since = torch.ones_like(live, dtype=torch.bool), torch.zeros_like(live, dtype=torch.bool)
    live = live[spent < iterations]
    while len(live):
        if len(renewed := live[due[live]]):
            normal[renewed], _ = problem.normal_equations(unknowns[renewed], renewed, _at(parts, renewed))
            due[renewed], moved_since[renewed] = False, False
            used[renewed] += 1
        gradient = problem.gradient(unknowns[live], live, _at(parts, live))
        steps = _damped_steps(*_scale_system(normal[live], gradient), level[live] + damping.ridge)
        trial = problem.move(unknowns[live], steps)
        trial_value, trial_parts = problem.evaluate(trial, live)
        better, gains = trial_value < value[live], trial_value < CHORD_GAIN * value[live]
        stale = moved_since[live]
        ended = problem.at_rest(unknowns[live], steps, trial, better) & (better | ~stale)
        moved = live[better]
        unknowns[moved], value[moved] = trial[better], trial_value[better]
        for part, new in zip(parts, trial_parts):
            part[moved] = new[better]
        grown = torch.where(stale, level[live], level[live] * damping.grow)  # a matrix of another point is blamed before the damping is
        level[live] = torch.where(better, level[live] * damping.shrink, grown).clamp_min(damping.least)
        due[live], moved_since[live] = ~gains & (better | stale), stale | better
        spent[live] += 1
        ended |= (level[live] >= damping.most) | (spent[live] >= iterations) | (due[live] & (used[live] >= matrices))
        live = live[~ended]
    return Minimum(unknowns=unknowns, value=value, parts=parts)


def _at(parts: Parts, rows: Tensor) -> Parts:
    return tuple(part[rows] for part in parts)


def _scale_system(normal: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The normal matrix with a diagonal of ones (m, k, k), the gradient (m, k), and the unknowns' scale (m, k)."""
    scale = normal.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(normal.dtype).tiny).rsqrt()
    return normal * scale[:, :, None] * scale[:, None, :], gradient, scale


def _damped_steps(normal: Tensor, gradient: Tensor, scale: Tensor, damping: Tensor) -> Tensor:
    """The damped Gauss–Newton steps, zero where the matrix is singular: (m, k)."""
    eye = torch.eye(normal.shape[1], dtype=normal.dtype, device=normal.device)
    lower, failed = torch.linalg.cholesky_ex(normal + damping[:, None, None] * eye)
    steps = torch.cholesky_solve((gradient * scale)[:, :, None], lower)[:, :, 0] * scale
    return torch.where((failed == 0)[:, None], steps, torch.zeros_like(steps))
