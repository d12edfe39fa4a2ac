"""What an error in the middle of an attack means for its outcome."""

from __future__ import annotations

import torch

from dosimeter.types import Outcome


def outcome_of_error(error: Exception) -> tuple[Outcome, str]:
    """The outcome that an error's type stands for, and a sentence that quotes the error."""
    line = first_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Outcome.CRASHED, f"out of memory; fewer restarts, a smaller batch or smaller images would need less: {line}"
    if isinstance(error, OverflowError):
        return Outcome.DIVERGED, f"a step left the range of numbers; a smaller learning rate would stay in it: {line}"
    return Outcome.CRASHED, f"stopped by an error of the model or of PyTorch: {line}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
