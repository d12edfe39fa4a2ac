"""One random stream for each role, derived from the seed, so that a change in one role leaves the others' numbers alone.

The client's streams depend on a secret too: its own batch. So the same seed gives the same bits, and a server that knows the seed cannot
draw the client's noise again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from dosimeter.artefacts import fingerprint

WORDS = 624  # of the Mersenne twister, PyTorch's stream on a CPU; a seed sets only 32 bits of them
WORDS_OFFSET = 24  # bytes of `Generator.get_state` before the words


def generator(seed: int, role: str, device: torch.device | str = "cpu", secret: str = "") -> Generator:
    """A generator that depends on the seed, the role's name and the secret alone."""
    return _seed(Generator(device), seed, role, secret)


@contextmanager
def global_seed(seed: int, role: str, secret: str = "") -> Iterator[None]:
    """Seed PyTorch's global streams, from which dropout layers draw, by seed, role and secret. The old state returns afterwards."""
    with torch.random.fork_rng():
        if torch.cuda.is_available():
            torch.manual_seed(_derive_seed(seed, role, secret))
        # `torch.manual_seed` also queues seeds for GPUs, which takes longer than a small attack
        _seed(torch.default_generator, seed, role, secret)
        yield


def secret_of(*private: Tensor) -> str:
    """A hash of private tensors that nobody can compute without them."""
    return fingerprint("secret of a client", *private, digits=64)


def _seed(stream: Generator, seed: int, role: str, secret: str) -> Generator:
    stream.manual_seed(_derive_seed(seed, role, secret))
    if secret and stream.device.type == "cpu":  # 32 bits could be searched
        state = stream.get_state()
        words = hashlib.shake_256(f"{seed}/{role}/{secret}".encode()).digest(4 * WORDS)
        drawn = torch.frombuffer(bytearray(words), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
        state[WORDS_OFFSET : WORDS_OFFSET + 8 * WORDS] = drawn.view(torch.uint8)
        stream.set_state(state)
    return stream


def _derive_seed(seed: int, role: str, secret: str) -> int:
    return int(fingerprint(f"{seed}/{role}" + (f"/{secret}" if secret else "")), 16) >> 1  # 63 bits: PyTorch takes no seed beyond
