"""What one `dosimeter run` walks through: files, functions, changes of file, modules imported, exposures checked, models copied.

    python benchmarks/walk.py [key=value ...]

Prints one line of JSON. A change of file is a call from a function of one file into a function of another. Nothing is timed,
so that the same code gives the same numbers on every machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import dosimeter

PACKAGE = str(Path(dosimeter.__file__).parent)
EXPERIMENT = ["labels=ilrg", "attack.name=inverting_gradients", "attack.steps=2", "data.batch_size=2", "data.name=photographs"]


class Walk:
    """Counts calls between functions of the package."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str, int]] = set()
        self.changes = 0
        self.calls: dict[str, int] = {}
        self._stack: list[str | None] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
        if not inside:
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        self.files.add(code.co_filename)
        self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
        self.calls[code.co_name] = self.calls.get(code.co_name, 0) + 1
        if self._stack and self._stack[-1] != code.co_filename:
            self.changes += 1
        self._stack.append(code.co_filename)


def walk(words: list[str]) -> dict[str, int]:
    from dosimeter.cli import main

    _run(main, words)  # imports are not part of the walk
    import copy

    copies, plain = 0, copy.deepcopy

    def counted(value: Any, *rest: Any) -> Any:
        import torch

        nonlocal copies
        copies += isinstance(value, torch.nn.Module) and not rest
        return plain(value, *rest)

    trace = Walk()
    copy.deepcopy = counted
    sys.setprofile(trace)
    try:
        _run(main, words)
    finally:
        sys.setprofile(None)
        copy.deepcopy = plain
    return {
        "files": len(trace.files),
        "functions": len(trace.functions),
        "changes_of_file": trace.changes,
        "modules_imported": _modules_imported(words),
        "exposures_checked": trace.calls.get("check_exposure", 0),
        "models_copied": copies,
    }


def _run(main: Any, words: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["run", *words, "--json"])
    if code:
        raise SystemExit(f"dosimeter run {' '.join(words)}: exit {code}")


def _modules_imported(words: list[str]) -> int:
    """Of the package, by one run in a fresh process."""
    script = (
        "import sys, io, contextlib\nfrom dosimeter.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n    main(sys.argv[1:])\n"
        "print(sum(name.split('.')[0] == 'dosimeter' for name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script, "run", *words, "--json"], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


if __name__ == "__main__":
    print(json.dumps(walk(sys.argv[1:] or EXPERIMENT)))
