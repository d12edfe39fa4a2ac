"""One random stream for each role, derived from the seed, so that a change in one role leaves the others' numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator

from dosimeter.artefacts import fingerprint


def generator(seed: int, role: str, device: torch.device | str = "cpu") -> Generator:
    """A generator that depends on the seed and the role's name alone."""
    return Generator(device).manual_seed(_derive_seed(seed, role))


@contextmanager
def global_seed(seed: int, role: str) -> Iterator[None]:
    """Seed PyTorch's global streams, from which dropout layers draw, by seed and role. The old state returns afterwards."""
    with torch.random.fork_rng():
        if torch.cuda.is_available():
            torch.manual_seed(_derive_seed(seed, role))
        else:  # `torch.manual_seed` also queues seeds for GPUs, which takes longer than a small attack
            torch.default_generator.manual_seed(_derive_seed(seed, role))
        yield


def _derive_seed(seed: int, role: str) -> int:
    return int(fingerprint(f"{seed}/{role}"), 16) >> 1  # 63 bits: PyTorch takes no seed beyond
