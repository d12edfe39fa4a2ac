"""Least squares whose answer depends on the numbers alone."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_fit(system: Tensor, wanted: Tensor) -> Tensor:
    """The x (..., n, k) for which system (..., m, n) x comes nearest to wanted (..., m, k); the shortest one, on a CPU, where several do.

    `torch.linalg.lstsq` begins with LAPACK's gelsy, whose pivots PyTorch takes from memory that it has not written: the same call gives
    other digits from time to time. gelsd has no pivots. A GPU knows gels alone, which needs full rank.
    """
    driver = "gelsd" if system.device.type == "cpu" else "gels"
    return torch.linalg.lstsq(system, wanted, driver=driver).solution  # noqa: TID251
