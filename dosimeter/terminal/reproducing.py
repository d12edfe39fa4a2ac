"""The command `dosimeter reproduce`: one table, all tables of a paper, or the state of all papers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dosimeter.bars import step_bar
from dosimeter.runs.devices import choose_device
from dosimeter.runs.reproduction.inventory import Paper, papers, status_of, tables_of, write_result
from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.reproduce import Reproduction, reproduce
from dosimeter.runs.reproduction.tables import read_table, summaries, table_files
from dosimeter.terminal.failures import say
from dosimeter.terminal.reproduction import print_reproduction, print_status, print_tables


def run_reproduce(options: argparse.Namespace, print_json: Callable[[Any], None]) -> int:
    """The exit code is 2 where a table of a paper lacks its data; the other tables run all the same."""
    if options.status:
        _show_status(options, print_json)
        return 0
    if options.table is None:
        print_json(summaries()) if options.json else print_tables(summaries())
        return 0
    keys = _keys(options.table)
    results, failures = [], []
    for key in keys:
        try:
            result = _run_table(key, options)
        except FileNotFoundError as error:
            if len(keys) == 1:
                raise
            failures.append(f"{key} was left out: {error}")
            continue
        results.append(result)
        if not options.json:
            print_reproduction(result)
    if options.json:
        print_json([result.as_json() for result in results] if options.table in papers() else results[0].as_json())
    for failure in failures:
        say(failure)
    return 2 if failures else 0


def _keys(word: str) -> list[str]:
    """A paper's tables where `word` is a paper, else the one table."""
    return (tables_of(word) if word in papers() and word not in table_files() else []) or [word]


def _run_table(key: str, options: argparse.Namespace) -> Reproduction:
    table = read_table(key, quick=options.quick)
    if options.seed is not None:
        table = replace(table, seed=options.seed)
    folders = {name: Path(value).expanduser() for name in ("data", "cache") if (value := getattr(options, name))}
    device = str(choose_device(options.device))
    out = Path(options.out)
    with step_bar() as listener:
        result = reproduce(table, Library(**folders), out=out / table.key, device=device, progress=listener)
    write_result(out, result)
    return result


def _show_status(options: argparse.Namespace, print_json: Callable[[Any], None]) -> None:
    chosen = _chosen_papers(options.table)
    found = {paper.key: status_of(paper, Path(options.out)) for paper in chosen}
    if options.json:
        print_json({key: [vars(item) for item in items] for key, items in found.items()})
        return
    for paper in chosen:
        print_status(paper, found[paper.key])


def _chosen_papers(word: str | None) -> list[Paper]:
    known = papers()
    if word is not None and word not in known:
        raise ValueError(f"reproduce --status: expected a paper, one of {', '.join(known)}, got {word!r}")
    return list(known.values()) if word is None else [known[word]]
