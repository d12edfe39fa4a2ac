"""Signals that ask a run to stop. A computation that saves checkpoints saves one first; anything else stops at once."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 8.0  # seconds from a signal until a computation is stopped that has not saved itself by then


class Stopped(KeyboardInterrupt):
    """A signal stopped the run. As a KeyboardInterrupt, it passes what catches the errors of a method."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Stop:
    """The signal that came, 0 before; how many computations are under way that save checkpoints; and the end of their time."""

    requested = 0
    saving = 0
    timer: threading.Timer | None = None


def stop_requested() -> bool:
    """Whether a signal has come, so that a checkpoint is due now."""
    return _Stop.requested != 0


def stop_if_requested() -> None:
    """Stop here, if a signal has come. Call this where everything is saved."""
    if _Stop.requested:
        raise Stopped(_Stop.requested)


@contextmanager
def saving_before_stop() -> Iterator[None]:
    """Inside this block, a first signal waits until the computation has saved a checkpoint, but no longer than `GRACE`."""
    _Stop.saving += 1
    try:
        yield
    finally:
        _Stop.saving -= 1


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Inside this block, SIGINT and SIGTERM raise `Stopped`. Outside of the main thread, where none arrive, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.signal(number, _handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _Stop.timer is not None:
            _Stop.timer.cancel()
        _Stop.requested, _Stop.timer = 0, None


def _handle(number: int, frame: FrameType | None) -> None:
    if _Stop.requested or not _Stop.saving:
        raise Stopped(_Stop.requested or number)
    _Stop.requested = number
    _Stop.timer = threading.Timer(GRACE, _thread.interrupt_main, (number,))
    _Stop.timer.daemon = True
    _Stop.timer.start()
