"""RLG: the classes whose column of the gradient a hyperplane cuts off from all others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import qr
from scipy.optimize import linprog
from torch import Generator, Tensor

from dosimeter.engines.counting.batch_size import numerical_rank
from dosimeter.engines.counting.counts import present_classes
from dosimeter.engines.counting.one_hot_loss import require_sign_rule
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.progress import advance
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused

COMPLETIONS = 2  # of the basis, each by other columns
SOLVER_SLACK = 1e-7  # by which the solver lets a constraint be violated
LARGEST_SLACK = 1e-5  # of a separation that is taken for zero


@LABELS.register("rlg")
@dataclass(frozen=True, kw_only=True)
class RLG(LabelRecovery):
    """Takes a class for present where a linear program separates its gradient column from all others.

    Dang et al., "Revealing and Protecting Labels in Distributed Training", NeurIPS 2021, Section 3, as told by Ma et al., ICLR 2023,
    Section 2.2: ∇Wᵀ = P Σ Q, and class c is present iff some r has r·q_c < 0 and r·q_j ≥ 0 for all j ≠ c. Features may have any sign.
    The rank must be below min(classes − 1, features).
    Departures: the rank is numerical (the released code takes the true batch size). Present classes share the batch by their rows'
    lengths. Only the `candidates` longest rows are tried. `as_published=True` stops at presence and accepts a full rank.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SOFTMAX_LOSS})

    margin: PositiveFloat = 1e-3  # how far a class must be cut off, r in [−1, 1] per direction
    candidates: PositiveInt = 1000
    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        require_sign_rule(exposure, self.name)
        rows = find_head(exposure).weight_gradient
        assert rows is not None
        rank, full = numerical_rank(rows), min(rows.shape[0] - 1, rows.shape[1])
        if rank == 0:
            raise Refused("rlg needs a direction of the head's gradient that stands above rounding; this gradient has none")
        if rank >= full and not self.as_published:
            raise Refused(f"rlg needs a batch below min(classes − 1, features) = {full}; this gradient has full rank, {rank}")
        lengths = rows.double().norm(dim=1)  # (C,)
        scores = torch.zeros_like(lengths)
        tried = lengths.topk(min(self.candidates, len(rows))).indices
        scores[tried] = _separations(_directions(rows, rank), tried)
        present = scores > self.margin
        size = exposure.public.batch_size
        rule = "can be cut off from all others"
        return present_classes(scores, present, lengths, size, once=self.as_published, rule=rule)


def _directions(rows: Tensor, rank: int) -> np.ndarray:
    """Q: the `rank` leading directions of the column space of ∇W, one column a class: (S, C)."""
    left, _, _ = torch.linalg.svd(rows.double(), full_matrices=False)
    return left[:, :rank].T.cpu().numpy()


def _separations(directions: np.ndarray, classes: Tensor) -> Tensor:
    """How far each class can be cut off: the largest −r·q_c with r·q_j ≥ 0 for the others and |r| ≤ 1."""
    inseparable = _inseparable(directions)
    found = []
    for done, label in enumerate(classes.tolist()):
        found.append(0.0 if inseparable[label] else _separation(directions, label))
        advance(done + 1, len(classes), "linear programs")
    return torch.tensor(found, dtype=torch.float64, device=classes.device)


def _separation(directions: np.ndarray, label: int) -> float:
    others = np.delete(directions, label, axis=1)  # (S, C − 1)
    solved = linprog(directions[:, label], A_ub=-others.T, b_ub=np.zeros(others.shape[1]), bounds=(-1, 1), method="highs")
    return -solved.fun if solved.status == 0 else 0.0


def _inseparable(directions: np.ndarray) -> np.ndarray:
    """Which classes a few others prove to be inseparable, without a program of their own: (C,).

    Where Σ λ_j q_j = 0 with λ > 0 over columns of full rank, their nonnegative combinations are the whole space. Every other
    class is then one of them, q_c = Σ μ_j q_j, and r·q_j ≥ 0 leaves r·q_c ≥ 0. A basis of long columns is completed by
    further columns, and again by others, which proves the first ones. A proof counts where the solver's slack cannot undo it.
    """
    rank, count = directions.shape
    proved = np.zeros(count, dtype=bool)
    basis = np.asarray(qr(directions, mode="r", pivoting=True)[-1])[:rank]
    coordinates = np.linalg.lstsq(directions[:, basis], directions, rcond=None)[0]  # (S, C)
    free = np.ones(count, dtype=bool)  # columns that may complete the basis
    free[basis] = False
    for _ in range(COMPLETIONS):
        columns = np.flatnonzero(free)
        if not len(columns):
            break
        target = -directions[:, basis].sum(axis=1)
        solved = linprog(np.ones(len(columns)), A_eq=directions[:, columns], b_eq=target, method="highs")
        if solved.status != 0:
            break
        completing = columns[solved.x > 0]
        turns = np.maximum(-coordinates.min(axis=0), 0)  # how often Σ λ_j q_j = 0 is added to make all μ nonnegative
        weight = coordinates.sum(axis=0) + turns * (rank + solved.fun)  # Σ μ_j
        reached = weight * SOLVER_SLACK <= LARGEST_SLACK
        reached[basis] = reached[completing] = False
        proved |= reached
        free[completing] = False
    return proved
