"""The console that prints on stdout. Whatever a record or a path holds is printed as it stands: square brackets are no markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    return Console(markup=False, emoji=False, **options)
