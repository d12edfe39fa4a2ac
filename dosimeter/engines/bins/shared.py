"""Separates samples of which none lies alone in a bin, by the linear dependences between the bins' contents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLEAR_RANK = 30.0  # times the rounding noise that a direction of the contents must exceed to count
ZERO_SUM = 0.01  # how near to zero the null vectors of a sample's bins add up; those of other choices miss zero by about 1
MOST_CHOICES_A_BIN = 4  # above this many candidate choices a bin, the null vectors rule hardly any out
MOST_CHOICES = 40_000_000  # choices of one bin a functional, beyond which none is searched
CHOICES_AT_ONCE = 4096  # for each bin of the last functional
LARGEST_TURN = 0.1  # of the dependences, by errors
SETTLED_SHARE = 1e-6  # largest part of a sample that the equations may leave open


def separate_shared_bins(contents: Tensor, functional: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """What single samples add to the bins (n, d + 1), and the bin of each functional that they add it to (n, F).

    The contents of the bins are L = A M (m, d + 1). Row i of M is what sample i adds; column i of A marks its bins, one a
    functional. The rows of M are linearly independent, so N L = 0 gives N A = 0 for every null vector. A sample's bins are therefore
    a choice whose columns of N add up to zero, and M = A⁺ L. The method needs more bins than samples: about 1.1 bins a sample with
    three functionals. Reading off lone samples needs 1.25.
    """
    nothing = contents[:0], functional.new_zeros(0, len(functional.unique()))
    if nothing[1].shape[1] < 2:
        return nothing
    null = null_vectors(contents, noise)
    choices = _choices_adding_to_zero(null, functional)  # (n, F)
    if choices is None or not 0 < len(choices) <= MOST_CHOICES_A_BIN * len(contents):
        return nothing
    marks = _marks(choices, contents)
    _, weights, right = torch.linalg.svd(marks, full_matrices=False)
    free = 1 - right[weights > SETTLED_SHARE * weights.max()].square().sum(0)  # (n,) the part of each column that the equations leave open
    found = torch.linalg.pinv(marks, rtol=SETTLED_SHARE) @ contents
    settled = free < SETTLED_SHARE
    return found[settled], choices[settled]


def separate_all(contents: Tensor, functional: Tensor, null: Tensor, samples: int) -> tuple[Tensor, Tensor] | None:
    """What each of all samples adds to the bins (B, d + 1) of full rank B, and its bin of each functional (B, F); None where several fit.

    The bins of every sample are a choice that adds to zero (`separate_shared_bins`). Where no more choices do than there are samples, these
    are the samples' bins. So A is known, and M with it, whatever weights the samples have.
    """
    if not 0 < samples <= len(contents) or len(functional.unique()) < 2:
        return None
    choices = _choices_adding_to_zero(null, functional)
    if choices is None or len(choices) != samples:
        return None
    marks = _marks(choices, contents)
    if int(torch.linalg.matrix_rank(marks)) < samples:
        return None
    return torch.linalg.pinv(marks) @ contents, choices


def _marks(choices: Tensor, contents: Tensor) -> Tensor:
    """The bins of each choice (n, F), as columns of ones: (m, n)."""
    marks = torch.zeros(len(contents), len(choices), dtype=contents.dtype, device=contents.device)
    return marks.scatter_(0, choices.T, 1.0)


def null_vectors(contents: Tensor, noise: float) -> Tensor:
    """The linear dependences between the bins' contents (m, d + 1), but for noise: (m, q), orthonormal."""
    left, sizes, _ = torch.linalg.svd(contents, full_matrices=False)
    return left[:, sizes <= noise]


def dependences(contents: Tensor, noise: float, blur: float, samples: int | None) -> tuple[int, Tensor]:
    """The least rank that contents (m, d + 1) have without what blurs them, at most the number of samples, and their `null_vectors`.

    Errors of spectral norm `blur` move no singular value by more (Weyl). So where as many exceed it as there are samples, all other
    directions are dependences. Errors turn these by the share that they have of the smallest such value (Wedin).
    """
    left, sizes, _ = torch.linalg.svd(contents, full_matrices=False)
    rank = int((sizes > max(blur, CLEAR_RANK * noise)).sum())
    if 0 < rank == samples and rank < len(sizes) and float(sizes[rank]) <= LARGEST_TURN * float(sizes[rank - 1]):
        return rank, left[:, rank:]
    return rank, left[:, sizes <= noise] if blur <= noise else left[:, :0]


def possible_places(null: Tensor, places: Tensor) -> Tensor:
    """Whether one sample can lie in these bins (n, F), one a functional: their rows of `null` (m, q) add up to zero.

    A mixture of two samples in one bin of one functional lies in other bins of the other functionals than its samples do. Without
    dependences nothing shows a place to be possible.
    """
    if null.shape[1] == 0:
        return torch.zeros(len(places), dtype=torch.bool, device=places.device)
    return null[places].sum(1).norm(dim=1) <= ZERO_SUM


def _choices_adding_to_zero(null: Tensor, functional: Tensor) -> Tensor | None:
    """Every choice of one bin a functional (n, F) whose rows of `null` (m, q) add up to zero; None if there are too many to try."""
    bins = [(functional == f).nonzero().flatten() for f in functional.unique()]
    if math.prod(len(one) for one in bins) > MOST_CHOICES:
        return None
    tried = torch.cartesian_prod(*bins[:-1]).reshape(-1, len(bins) - 1)  # (t, F - 1)
    last, found = null[bins[-1]], []
    for piece in tried.split(CHOICES_AT_ONCE):
        sums = null[piece].sum(1)
        apart = sums.square().sum(1)[:, None] + last.square().sum(1) + 2 * sums @ last.T  # (piece, m_F)
        rows, columns = (apart <= ZERO_SUM**2).nonzero().unbind(1)
        found.append(torch.cat([piece[rows], bins[-1][columns, None]], 1))
    return torch.cat(found)
