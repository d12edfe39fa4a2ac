"""What an error in the middle of an attack means for its outcome."""

from __future__ import annotations

import torch

from dosimeter.types import Outcome

# What PyTorch says where it has no memory and no type for the error: the CPU's allocator, the CUDA runtime, and CUDA's libraries.
OUT_OF_MEMORY_PHRASES = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


def outcome_of_error(error: Exception) -> tuple[Outcome, str]:
    """The outcome that an error stands for, and a sentence that quotes the error."""
    line = first_line(error)
    if is_out_of_memory(error):
        return Outcome.CRASHED, f"out of memory; fewer restarts, a smaller batch or smaller images would need less: {line}"
    if isinstance(error, OverflowError):
        return Outcome.DIVERGED, f"a step left the range of numbers; a smaller learning rate would stay in it: {line}"
    return Outcome.CRASHED, f"stopped by an error of the model or of PyTorch: {line}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python or PyTorch could not allocate memory: told by the error's type, or by its words where PyTorch has no type for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in OUT_OF_MEMORY_PHRASES)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
