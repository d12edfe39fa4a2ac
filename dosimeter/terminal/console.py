"""The console that prints on stdout. Square brackets of a record or a path are no markup, and control characters are left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})  # ESC begins a terminal's commands


class PlainConsole(Console):
    """Prints text without the characters that command a terminal. Only rich's own colours do."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(CONTROL_CHARACTERS), style, control)

    def on_broken_pipe(self) -> NoReturn:
        """Say that nobody reads, as every command does, where rich ends the program."""
        raise BrokenPipeError


def plain_console(**options: Any) -> Console:
    return PlainConsole(markup=False, emoji=False, **options)
