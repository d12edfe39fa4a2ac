"""Every registered method, as `dosimeter list` prints it."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from dosimeter.terminal.console import plain_console


def print_catalogue(entries: list[dict[str, Any]]) -> None:
    console = plain_console()
    kind = None
    for entry in entries:
        if entry["kind"] != kind:
            kind = entry["kind"]
            console.print(Text(f"\n{kind}", "bold underline"))
        console.print(Text.assemble(("  " + entry["name"], "bold"), f"  {entry['idea']}"), soft_wrap=True)
        if entry["needs"]:
            console.print(Text(f"      needs: {', '.join(entry['needs'])}", "cyan"), soft_wrap=True)
        for said, verb in (("promise", "promises"), ("breaks", "breaks")):
            if said in entry:
                console.print(Text(f"      {verb}: {entry[said]}", "cyan"), soft_wrap=True)
        for option in entry["options"]:
            default = "required" if option["required"] else f"default {option['default']}"
            console.print(Text(f"      {option['name']}: {option['type']}, {default}", "dim"), soft_wrap=True)
