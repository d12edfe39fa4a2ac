"""Progress of long computations, reported to whatever listener the caller has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Listener = Callable[[int, int, str], None]  # steps done, steps in all, a short note


@dataclass(frozen=True)
class Progress:
    """Where an audit stands."""

    method: str
    position: int  # of the method in the audit, from 0
    methods: int
    done: int = 0  # steps of this method
    steps: int = 1
    note: str = ""
    left: float | None = None  # seconds that the methods with steps are expected to take from here on; None: not known
    timed: bool = False  # one step of the method is timed, and no method has begun yet


_listener: ContextVar[Listener | None] = ContextVar("progress", default=None)


def advance(done: int, total: int, note: str = "") -> None:
    listener = _listener.get()
    if listener is not None:
        listener(done, total, note)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
