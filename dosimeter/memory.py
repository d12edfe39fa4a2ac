"""Memory: how much is free, and work cut into pieces that fit."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CONTAINER_FILES = (  # limit, use, and what the use consists of
    tuple(Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat")),
    tuple(Path("/sys/fs/cgroup/memory") / name for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")),
)
CACHED_FILES = ("file", "total_cache")  # counted as used, and given up when memory is short
MEMORY_VARIABLE = "DOSIMETER_MEMORY_GB"
USUAL_LIMIT = 8  # GB of a run on a CPU; an attack that takes more takes days there
UNKNOWN = 2**40  # bytes, where the system says nothing


def free_memory() -> int:
    """The bytes that this process can still take: of the machine, of its container, and of its own limit."""
    return max(0, min(_free_on_machine(), _free_in_container(), _free_for_process()))


def spare_memory() -> int:
    """The bytes that one method may still take: what is free, and what the run's limit leaves beside what it holds already."""
    try:
        limit = float(os.environ.get(MEMORY_VARIABLE, USUAL_LIMIT)) * 1e9
    except ValueError:
        raise ValueError(f"{MEMORY_VARIABLE}: expected a number of GB, got {os.environ[MEMORY_VARIABLE]!r}") from None
    held = _numbers(Path("/proc/self/status")).get("VmRSS", 0) * 1024
    return int(max(0, min(free_memory(), limit - held)))


def require_memory(needed: float, purpose: str) -> None:
    """Refuse, in a sentence, what does not fit."""
    free = free_memory()
    if needed > free:
        raise ValueError(f"{purpose} needs about {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free")


def _free_on_machine() -> int:
    fields = _numbers(Path("/proc/meminfo"))
    return fields.get("MemAvailable", UNKNOWN // 1024) * 1024


def _free_in_container() -> int:
    for limit, use, parts in CONTAINER_FILES:
        try:
            free = int(limit.read_text()) - int(use.read_text())
        except (OSError, ValueError):
            continue  # no such container, or no limit
        return free + sum(_numbers(parts).get(name, 0) for name in CACHED_FILES)
    return UNKNOWN


def _free_for_process() -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return UNKNOWN
    return limit - _numbers(Path("/proc/self/status")).get("VmSize", 0) * 1024


def _numbers(path: Path) -> dict[str, int]:
    """The lines `Name: number kB` or `name number` of a file of the system."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
