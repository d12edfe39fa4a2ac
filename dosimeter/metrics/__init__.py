"""How close a recovery is to the truth. Row i of the one is compared with row i of the other."""

from __future__ import annotations

from torch import Tensor


def check_paired(metric: str, recovered: Tensor, truth: Tensor, *, dimensions: int = 2) -> None:
    """Refuse tensors that cannot be compared row by row; broadcasting would hide the mistake."""
    if recovered.shape != truth.shape:
        raise ValueError(f"{metric}: expected as many recovered rows as true ones, got {tuple(recovered.shape)} and {tuple(truth.shape)}")
    if truth.ndim < dimensions:
        raise ValueError(f"{metric}: expected at least {dimensions} dimensions, got shape {tuple(truth.shape)}")
