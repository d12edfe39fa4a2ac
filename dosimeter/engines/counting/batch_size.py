"""How many samples a gradient is the mean of, where the client does not declare it."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.types import Outcome, Refused

LARGEST_SIZE = 4096  # of the batch sizes tried
WHOLE_COUNT_TOLERANCE = 0.1  # samples that a count may be off a whole number
MOST_BY_CHANCE = 0.01  # sizes that may be expected to fit by chance; with more, a fit proves nothing


def declared_or_inferred(declared: int | None, shares: Tensor, weight_gradient: Tensor | None, method: str) -> tuple[int, Outcome, str]:
    """The declared batch size, else the size that explains the gradient, else the gradient's rank; with a sentence that says which.

    Each sample adds one outer product to the head's gradient, so its rank is a lower bound on the batch size. The rank is the size
    itself where it is not full and no two samples are alike. That is a guess, so the outcome is partial.
    """
    if declared is not None:
        return declared, Outcome.COMPLETED, ""
    rank = 0 if weight_gradient is None else numerical_rank(weight_gradient)
    size = batch_size_of(shares, rank)
    if size is not None:
        return size, Outcome.COMPLETED, f"the batch size is not declared; {size} is the smallest that explains the gradient"
    unexplained = f"no size up to {LARGEST_SIZE} turns the classes' shares into whole counts better than chance would"
    if weight_gradient is None or not 0 < rank < min(weight_gradient.shape[0] - 1, weight_gradient.shape[1]):
        raise Refused(f"{method} needs the batch size here: {unexplained}")
    return rank, Outcome.PARTIAL, f"the batch size is not declared and {unexplained}; {rank}, the gradient's rank, is its least and a guess"


def batch_size_of(shares: Tensor, rank: int = 0) -> int | None:
    """The smallest batch size that makes every class's share (C,) a whole count and is not below the gradient's rank.

    Shares fix the counts only up to a common factor. None where no size fits, or where the smallest that fits may do so by chance.
    Random counts of k classes, which sum to the size, are all within δ of whole numbers with probability (2 δ)^(k − 1).
    """
    sizes = torch.arange(max(rank, 1), LARGEST_SIZE + 1, device=shares.device, dtype=torch.float64)
    largest = shares.to(torch.float64).topk(min(len(shares), 256)).values  # the present classes have the largest shares
    counts = sizes[:, None] * largest  # (sizes, classes)
    off = (counts - counts.round()).abs()
    fits = (off <= WHOLE_COUNT_TOLERANCE).all(1) & ((counts.round().clamp_min(0).sum(1) - sizes).abs() < 0.5)
    if not bool(fits.any()):
        return None
    first = int(fits.to(torch.uint8).argmax())  # also the number of sizes that were tried in vain
    present = int((counts[first].round() > 0).sum())
    by_chance = first * (2 * float(off[first].max())) ** (present - 1)
    return int(sizes[first]) if by_chance < MOST_BY_CHANCE else None


def numerical_rank(matrix: Tensor) -> int:
    """How many singular values exceed the rounding noise of the matrix's own precision."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    noise = torch.finfo(matrix.dtype).eps
    singular = torch.linalg.eigvalsh(tall.double().T @ tall.double()).clamp_min(0).sqrt()
    return int((singular > singular.max() * max(noise, 1e-8) * matrix.shape[0] ** 0.5).sum())
