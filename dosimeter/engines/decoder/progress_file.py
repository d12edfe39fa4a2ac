"""So that a killed training goes on after its last whole epoch: all of its tensors in one file, written whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class ProgressFile:
    """Where a training keeps its state, and how often."""

    path: Path
    key: str = ""  # of all that the training depends on
    every: float = 30.0  # seconds
    _last: float = field(default_factory=time.monotonic, init=False, repr=False)

    def save(self, state: Callable[[], dict[str, Tensor]], epoch: int) -> None:
        """Write the state at the beginning of `epoch`, if it is time."""
        if time.monotonic() - self._last < self.every:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, state(), {"epoch": str(epoch), "key": self.key})
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], int] | None:
        """What an earlier run of the same training left, or None; a torn file counts as none."""
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata["key"] != self.key:
                    return None
                return {name: file.get_tensor(name).clone() for name in file.keys()}, int(metadata["epoch"])  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, ValueError):
            return None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def write_whole(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file that is either complete or not there."""
    partial = path.with_suffix(f".{os.getpid()}")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial, metadata)
    os.replace(partial, path)
