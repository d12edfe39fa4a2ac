"""How exactly a GPU multiplies single-precision numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether products on an NVIDIA GPU may round their factors to TF32, inside. The caller's setting is restored.

    PyTorch allows it for convolutions by default. TF32 keeps 10 of the 23 bits of a factor, so that a gradient has an error of a
    thousandth.
    """
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution
