"""What a benchmark measured, as a JSON file from which docs/results/build.py writes a fact of a page."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dosimeter as dm

NOT_PART = ("--record", "--out", "--place")  # options that name files, and change no number


def write_measurement(
    file: Path, seeds: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], findings: Sequence[str], commands: Sequence[str] = ()
) -> None:
    """Write numbers with the command that gave them, its seeds, the machine and the version. Merged parts have a command each."""
    measured = {
        "command": list(commands) if len(commands) > 1 else commands[0] if commands else command_line(sys.argv),
        "seeds": seeds,
        "machine": f"{os.cpu_count()} CPU cores",
        "version": dm.__version__,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "findings": list(findings),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command_line(words: Sequence[str]) -> str:
    """The command as it is typed at the root of the repository."""
    kept = [word for before, word in zip(["", *words], words) if word not in NOT_PART and before not in NOT_PART]
    return shlex.join(["python", f"benchmarks/{Path(kept[0]).name}", *kept[1:]])
