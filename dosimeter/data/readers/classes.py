"""Class ids and class names as files give them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dosimeter.files import check_class_id


def class_ids(array: np.ndarray, count: int, origin: object) -> Tensor:
    """N or N×1 whole numbers of at least 0 as (N,) int64."""
    if array.shape not in ((count,), (count, 1)):
        raise ValueError(f"{origin}: expected {count} labels, one for each image, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{origin}: expected class ids as integers, got {array.dtype}")
    if array.size and int(array.min()) < 0:
        raise ValueError(f"{origin}: expected class ids of at least 0, got {int(array.min())}")
    if array.size:
        check_class_id(int(array.max()), origin)
    return torch.from_numpy(array.astype(np.int64).reshape(count))  # in the machine's byte order


def numeric_names(labels: Tensor) -> tuple[str, ...]:
    """Names for classes that have none: 0, 1, ... up to the largest id."""
    return tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 1)))
