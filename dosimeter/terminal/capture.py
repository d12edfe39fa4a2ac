"""A capture as `dosimeter capture show` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from dosimeter.captures.capture import FORMAT, Capture
from dosimeter.captures.store import captures_in, read_capture, read_model
from dosimeter.config import describe
from dosimeter.terminal.console import plain_console

UNSAID = "not said"


def read_captures(path: str) -> list[dict[str, Any]]:
    """What each capture holds, as plain JSON: of one file, or of all files of a folder."""
    paths = captures_in(path) if Path(path).is_dir() else [Path(path)]
    if not paths:
        raise ValueError(f"{path}: no captures there; `dm.write_capture` writes them")
    return [_summary(each, read_capture(each)) for each in paths]


def print_captures(summaries: list[dict[str, Any]]) -> None:
    console = plain_console()
    for summary in summaries:
        console.print(Text(summary["file"], "bold"), soft_wrap=True)
        for name, value in summary.items():
            if name != "file":
                console.print(f"  {name.replace('_', ' ')}: {_words(value)}", soft_wrap=True)


def _summary(path: Path, capture: Capture) -> dict[str, Any]:
    facts = describe(capture.facts)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in capture.update.values()})
    return {
        "file": str(path),
        "format": FORMAT,
        **{name: facts.get(name) for name in ("kind", "round", "client", "clients", "training", "loss", "defenses")},
        **{name: facts.get(name) for name in ("privacy", "batch_size", "input_shape", "normalization", "mode", "framework", "before")},
        "model_is_beside": read_model(path, capture) is not None,
        "tensors": len(capture.update),
        "numbers": sum(tensor.numel() for tensor in capture.update.values()),
        "dtypes": dtypes,
    }


def _words(value: Any) -> str:
    if value is None or value == "":
        return UNSAID
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} {item}" for key, item in value.items() if key != "name")
        return f"{value.get('name', '')} {f'({options})' if options else ''}".strip()
    return ", ".join(map(_words, value)) or "none" if isinstance(value, list) else str(value)
