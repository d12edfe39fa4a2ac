"""Samples of which none lies alone, told apart by the linear dependences between the bins' contents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ADD_UP = 0.01  # how near to zero the null vectors of a sample's bins must add up; those of other choices miss it by about 1
CROWD = 4  # choices a bin from which the null vectors rule hardly any out
MOST = 40_000_000  # choices of one bin a functional that are looked through
PIECE = 4096  # of them at a time, for each bin of the last functional
SETTLED = 1e-6  # how far a sample's share may depend on the choice of solution


def separate(contents: Tensor, functional: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """What single samples add to the bins (n, d + 1), and the bin of each functional that they add it to (n, F).

    The contents of the bins are L = A M (m, d + 1): row i of M is what sample i adds, column i of A marks its bins, one a
    functional. Rows of M are linearly independent, so that N L = 0 gives N A = 0 for every null vector: the samples are among the
    choices of bins whose columns of N add up to zero, and M = A⁺ L. This needs more bins than samples, by as many as rule the
    other choices out: about 1.1 bins a sample with three functionals, where taking out lone samples needs 1.25.
    """
    nothing = contents[:0], functional.new_zeros(0, len(functional.unique()))
    if nothing[1].shape[1] < 2:
        return nothing
    left, sizes, _ = torch.linalg.svd(contents, full_matrices=False)
    null = left[:, sizes <= noise]  # (m, q)
    choices = _adding_up(null, functional)  # (n, F)
    if choices is None or not 0 < len(choices) <= CROWD * len(contents):
        return nothing
    marks = torch.zeros(len(contents), len(choices), dtype=contents.dtype, device=contents.device)  # A
    marks.scatter_(0, choices.T, 1.0)
    _, weights, right = torch.linalg.svd(marks, full_matrices=False)
    free = 1 - right[weights > SETTLED * weights.max()].square().sum(0)  # (n,) how far a column's share is open
    found = torch.linalg.pinv(marks, rtol=SETTLED) @ contents
    settled = free < SETTLED
    return found[settled], choices[settled]


def _adding_up(null: Tensor, functional: Tensor) -> Tensor | None:
    """Every choice of one bin a functional (n, F) whose rows of `null` (m, q) add up to zero; none where too many would be tried."""
    bins = [(functional == f).nonzero().flatten() for f in functional.unique()]
    if math.prod(len(one) for one in bins) > MOST:
        return None
    tried = torch.cartesian_prod(*bins[:-1]).reshape(-1, len(bins) - 1)  # (t, F - 1)
    last, found = null[bins[-1]], []
    for piece in tried.split(PIECE):
        sums = null[piece].sum(1)
        apart = sums.square().sum(1)[:, None] + last.square().sum(1) + 2 * sums @ last.T  # (piece, m_F)
        rows, columns = (apart <= ADD_UP**2).nonzero().unbind(1)
        found.append(torch.cat([piece[rows], bins[-1][columns, None]], 1))
    return torch.cat(found)
