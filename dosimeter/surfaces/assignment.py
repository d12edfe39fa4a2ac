"""Which recovered sample belongs to which true one."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

COLUMNS_AT_ONCE = 256  # columns at a time, so that one side may be a whole data set


def assign(recovered: Tensor, truth: Tensor, order: float = 2.0) -> Tensor:
    """The one-to-one matching of least total distance: for each truth the index of its recovered sample, or −1: (B,).

    The distance is not squared. By the triangle inequality a bad sample then cannot take the partner of an exact one; with
    squared distances a saturated image can. A recovered sample with a NaN or infinite entry has no partner. Where more than B
    samples were recovered, the B that fit best are taken, for an attack and for its foreign null.
    """
    cost = distances(recovered, truth, order).detach()  # (n, B)
    sound = cost.isfinite().all(1).nonzero().flatten()
    rows, columns = (torch.from_numpy(index).to(cost.device) for index in linear_sum_assignment(cost[sound].cpu().numpy()))
    assignment = torch.full((len(truth),), -1, dtype=torch.int64, device=cost.device)
    assignment[columns] = sound[rows]
    return assignment


def distances(rows: Tensor, columns: Tensor, order: float = 2.0) -> Tensor:
    """Distance of every row sample to every column sample, in float64: (n, m)."""
    flat = rows.flatten(1).to(torch.float64)
    pieces = columns.flatten(1).split(COLUMNS_AT_ONCE)
    return torch.cat([torch.cdist(flat, piece.to(torch.float64), p=order) for piece in pieces], 1)
