"""What the tests of the inspection share: a client's own data."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dosimeter.types import Batch


@pytest.fixture(scope="session")
def data() -> Callable[[int, int], Batch]:
    """Twelve smooth images of a size, and their labels, from a seed."""

    def draw(size: int, seed: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        coarse = torch.rand(12, 3, 4, 4, generator=rng)
        inputs = nn.functional.interpolate(coarse, (size, size), mode="bilinear")
        return Batch(inputs, torch.randint(10, (12,), generator=rng))

    return draw
