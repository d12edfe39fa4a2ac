"""Which clients took part in which rounds, from sums of their updates and from how often each took part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

SPECTRUM = 1e-4  # singular value of the rounds' sums, relative to the largest, below which it is rounding
WHOLE = 0.05  # distance from a whole number up to which a relaxed solution is one
FITS = 1e-3  # relative part of a vector that may lie outside the sums' space where updates are the same in every round


@dataclass(frozen=True, kw_only=True)
class Participation:
    """The rounds of every client, as far as the sums and the counts tell."""

    matrix: Tensor  # (n, K) bool
    unique: Tensor  # (K,) bool: no other rounds fit the sums and this client's counts
    misfit: float  # the largest part of a column outside the sums' space, relative


def find_participation(sums: Tensor, counts: Tensor, interval: int, seconds: float) -> Participation | None:
    """Eq. (2.3): for each client the 0/1 vector in the column space of `sums` (n, D) with its `counts` (intervals, K) in every interval.

    Σ_k P_tk g_k = s_t, so that the columns of P span the columns of the sums, if the K updates are independent. None where a client's
    vector is not found in the time.
    """
    rounds, clients = len(sums), counts.shape[1]
    outside = _complement(sums, clients)  # (n − K, n)
    windows = np.zeros((len(counts), rounds))
    for number in range(len(counts)):
        windows[number, number * interval : (number + 1) * interval] = 1
    found, unique, misfit = [], [], 0.0
    for client in range(clients):
        wanted = counts[:, client].double().numpy()
        vector, lone = _solve(outside, windows, wanted, seconds / clients)
        if vector is None:
            return None
        found.append(vector)
        unique.append(lone)
        misfit = max(misfit, _part_outside(outside, vector))
    matrix = torch.from_numpy(np.stack(found, 1) > 0.5)
    return Participation(matrix=matrix, unique=torch.tensor(unique), misfit=misfit)


def _complement(sums: Tensor, clients: int) -> np.ndarray:
    """An orthonormal basis of what is orthogonal to the K strongest directions of the rounds' sums: (n − K, n)."""
    return np.linalg.svd(sums.double().cpu().numpy(), full_matrices=True)[0][:, clients:].T


def independent_updates(sums: Tensor) -> int:
    """How many directions the rounds' sums have above rounding."""
    spectrum = torch.linalg.svdvals(sums.double())
    return int((spectrum > SPECTRUM * spectrum[0]).sum())


def _solve(outside: np.ndarray, windows: np.ndarray, wanted: np.ndarray, seconds: float) -> tuple[np.ndarray | None, bool]:
    """One client's rounds (n,), and whether no others fit."""
    equations = np.concatenate([outside, windows])
    relaxed, _, rank, _ = np.linalg.lstsq(equations, np.concatenate([np.zeros(len(outside)), wanted]), rcond=SPECTRUM)
    nearest = np.rint(relaxed)
    if rank == equations.shape[1] and np.abs(relaxed - nearest).max() <= WHOLE and np.isin(nearest, (0.0, 1.0)).all():
        return nearest, bool((windows @ nearest == wanted).all())  # linear equations alone determine the vector
    first, _ = _nearest_vector(outside, windows, wanted, seconds / 3, within=FITS)
    if first is None:  # the updates were not the same in every round
        first, _ = _nearest_vector(outside, windows, wanted, seconds / 3)
    if first is None:
        return None, False
    reach = max(FITS, 2 * _part_outside(outside, first))
    _, none_left = _nearest_vector(outside, windows, wanted, seconds / 3, within=reach, other_than=first)
    return first, none_left


def _part_outside(outside: np.ndarray, vector: np.ndarray) -> float:
    return float(np.linalg.norm(outside @ vector) / max(np.linalg.norm(vector), 1e-300))


def _nearest_vector(
    outside: np.ndarray,
    windows: np.ndarray,
    wanted: np.ndarray,
    seconds: float,
    *,
    within: float | None = None,
    other_than: np.ndarray | None = None,
) -> tuple[np.ndarray | None, bool]:
    """The 0/1 vector with the wanted counts that has the least absolute part outside, and whether it is proved that there is none.

    `within` takes any vector whose part outside is relatively as small, in place of the one with the least.
    """
    rows, rounds = outside.shape
    slack, none = np.eye(rows), np.zeros((len(windows), rows))
    limits = [
        _limit(np.hstack([outside, -slack]), np.full(rows, -np.inf), np.zeros(rows)),  # outside p ≤ t
        _limit(np.hstack([-outside, -slack]), np.full(rows, -np.inf), np.zeros(rows)),  # −outside p ≤ t
        _limit(np.hstack([windows, none]), wanted, wanted),
    ]
    if other_than is not None:  # at least one entry differs
        signs = np.concatenate([1 - 2 * other_than, np.zeros(rows)])
        limits.append(_limit(signs[None], np.array([1 - other_than.sum()]), np.array([np.inf])))
    most = np.inf if within is None else within * np.sqrt(max(wanted.sum(), 1.0))  # of one entry of the part outside
    solved = milp(
        np.concatenate([np.zeros(rounds), np.ones(rows) if within is None else np.zeros(rows)]),
        integrality=np.concatenate([np.ones(rounds), np.zeros(rows)]),
        bounds=Bounds(np.zeros(rounds + rows), np.concatenate([np.ones(rounds), np.full(rows, most)])),  # pyright: ignore[reportArgumentType]
        constraints=limits,
        options={"time_limit": seconds},
    )
    return (np.rint(solved.x[:rounds]) if solved.status == 0 and solved.x is not None else None), solved.status == 2


def _limit(matrix: np.ndarray, low: np.ndarray, high: np.ndarray) -> LinearConstraint:
    return LinearConstraint(matrix, low, high)  # pyright: ignore[reportArgumentType]
