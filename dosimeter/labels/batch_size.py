"""How many samples a gradient was made of, where the client does not say."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.types import Refused

LARGEST = 4096  # batch sizes tried
NEAR = 0.1  # how far from whole numbers the counts may lie


def declared_or_inferred(declared: int | None, shares: Tensor, weight_gradient: Tensor | None, method: str) -> tuple[int, str]:
    """The declared batch size, or the one that `batch_size_of` reads off the gradient, with a sentence that says so."""
    if declared is not None:
        return declared, ""
    size = batch_size_of(shares, weight_gradient)
    if size is None:
        raise Refused(f"{method} needs the batch size here: no size up to {LARGEST} turns the classes' shares into whole counts")
    return size, f"the batch size is not declared; {size} is the smallest that explains the gradient"


def batch_size_of(shares: Tensor, weight_gradient: Tensor | None = None) -> int | None:
    """The smallest batch size that makes every class's share (C,) a whole count and is not below the gradient's rank.

    The shares alone fix the counts up to a common factor; the rank of the head's gradient is a lower bound on the batch
    size, since each sample adds one outer product, and the size itself where the shares fit none and the rank is not
    full (the rank is B where B ≤ min(C − 1, H) and no two samples look alike).
    """
    rank = 0 if weight_gradient is None else numerical_rank(weight_gradient)
    sizes = torch.arange(max(rank, 1), LARGEST + 1, device=shares.device, dtype=torch.float64)
    largest = shares.to(torch.float64).topk(min(len(shares), 256)).values  # the present classes are among the largest shares
    counts = sizes[:, None] * largest  # (sizes, classes)
    fits = ((counts - counts.round()).abs() <= NEAR).all(1) & ((counts.round().clamp_min(0).sum(1) - sizes).abs() < 0.5)
    if bool(fits.any()):
        return int(sizes[fits][0])
    full = 0 if weight_gradient is None else min(weight_gradient.shape[0] - 1, weight_gradient.shape[1])
    return rank if 0 < rank < full else None


def numerical_rank(matrix: Tensor) -> int:
    """How many singular values stand above the rounding noise of the matrix's own precision."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    noise = torch.finfo(matrix.dtype).eps
    singular = torch.linalg.eigvalsh(tall.double().T @ tall.double()).clamp_min(0).sqrt()
    return int((singular > singular.max() * max(noise, 1e-8) * matrix.shape[0] ** 0.5).sum())
