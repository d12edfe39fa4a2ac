"""A sweep from the command line: its workers, its progress and its report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dosimeter.bars import step_bar
from dosimeter.records import cell_path, is_done, read_cell
from dosimeter.report.page import check_report_place, write_report
from dosimeter.runs.sweep import was_unprepared
from dosimeter.runs.workers import Processes, Ray, run_sweep


def sweep_and_report(content: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Carry out the sweep of a file's `content` and write its report. Returns how many experiments there are, are done, and crashed.

    Of those that are done, `refused` are without a model or data, and `why` is the first reason; the same command tries them again.
    """
    folder = Path(options.out)
    check_report_place(folder)
    with step_bar() as listener:
        engine = Ray(address=options.address, gpus=options.gpus) if options.on == "ray" else Processes(progress=listener)
        cells = run_sweep(content, folder, workers=options.workers, engine=engine)
    done = sum(is_done(folder, cell.key) for cell in cells)
    present = sum(cell_path(folder, cell.key).exists() for cell in cells)
    unprepared = [cell.key for cell in cells if was_unprepared(folder, cell.key)]
    why = read_cell(cell_path(folder, unprepared[0])).reason if unprepared else ""
    counts = {"experiments": len(cells), "done": done, "crashed": present - done, "refused": len(unprepared), "why": why}
    return counts | {"report": str(write_report(folder))}
