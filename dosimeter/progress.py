"""Progress of long computations, reported to whatever listener the caller has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int, str], None]  # steps done, steps in all, a short note

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
