"""Where a command's log goes: plain lines on stderr."""

from __future__ import annotations

import logging
import sys


class _ToStderr(logging.Handler):
    """Writes to whatever stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is closed
            return


def log_to_stderr() -> None:
    """Show what Dosimeter logs, down to information, once."""
    logger = logging.getLogger("dosimeter")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())
