"""One random stream a role, derived from the seed, so that switching one thing on does not move another's numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Generator


def generator(seed: int, role: str, device: torch.device | str = "cpu") -> Generator:
    """A generator that depends on the seed and the role's name alone."""
    digest = hashlib.sha256(f"{seed}/{role}".encode()).digest()
    return Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
