"""What each paper contains, item by item, and how far each item is reproduced.

`papers/<paper>.toml` lists a paper's tables and figures. What was measured stands beside it: the result of every table that was run,
`<paper>/<table>.json`, as the command writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dosimeter.artefacts import write_text
from dosimeter.config import construct, read_toml
from dosimeter.options import OptionError, check_fields, check_value
from dosimeter.records import finite_only
from dosimeter.runs.reproduction.comparing import Agreement
from dosimeter.runs.reproduction.quantities import COUNT, is_error
from dosimeter.runs.reproduction.reproduce import Reproduction
from dosimeter.runs.reproduction.tables import FOLDERS, SOURCE, table_files

CUT = "batches in the time given"  # of a row that a queue had no time to finish
RECORDED = SOURCE / "docs" / "results" / "records" / "reproductions"  # of a checkout; a wheel has them beside its tables


class Status(StrEnum):
    """How far an item of a paper is reproduced."""

    DONE = "done"  # every number and law agrees, or is exceeded, with as many batches as in the paper
    QUICK = "agrees in the quick profile"  # the same with fewer batches and smaller networks
    PARTLY = "agrees where measured"  # the same, but a row or a part is not measured
    SHORT = "short"  # a number or a law falls short
    NOT_YET = "not yet"  # nothing was measured
    IMPOSSIBLE = "impossible here"  # the data or weights are not at hand
    NOTHING = "nothing to measure"  # an illustration, or a list


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure of a paper."""

    name: str  # as the paper calls it
    shows: str
    tables: tuple[str, ...] = ()  # files of the paper's folder that repeat it
    missing: tuple[str, ...] = ()  # parts that no file repeats
    causes: tuple[str, ...] = ()  # of what falls short, checked by an experiment
    page: str = ""  # the page of docs/results with a measurement made otherwise
    judged: str = ""  # what that page shows: done or short
    impossible: str = ""  # why the item cannot be measured here
    illustration: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.judged not in ("", Status.DONE, Status.SHORT) or bool(self.judged) != bool(self.page):
            raise OptionError("judged", f"expected done or short beside a page, and neither without the other, got {self.judged!r}")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper and its items."""

    key: str
    title: str
    source: str
    items: tuple[Item, ...]


@dataclass(frozen=True, kw_only=True)
class ItemStatus:
    """An item with its verdict, the counts behind it and the reasons."""

    paper: str
    item: str
    shows: str
    status: Status
    reproduced: int = 0  # published numbers and laws
    exceeded: int = 0
    fell_short: int = 0
    rows: int = 0  # of its tables' results, and how many of them were measured
    measured_rows: int = 0
    profile: str = ""
    commands: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def papers() -> dict[str, Paper]:
    """Every paper by its key."""
    files: dict[str, Path] = {}
    for folder in FOLDERS:
        for file in sorted(folder.glob("*.toml")):
            files.setdefault(file.stem, file)
    return {key: _read_paper(key, file) for key, file in files.items()}


def tables_of(paper: str) -> list[str]:
    """The keys of a paper's tables."""
    return [key for key in table_files() if key.startswith(f"{paper}/")]


def result_of(table: str, out: Path | None = None) -> dict[str, Any] | None:
    """What was measured for a table: in the folder `out`, or the result that comes with Dosimeter."""
    for folder in (*((out,) if out is not None else ()), RECORDED, *FOLDERS):
        if (file := folder / f"{table}.json").is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    return None


def write_result(out: Path, result: Reproduction) -> None:
    """Keep a result beside the folder of its records, where `result_of` finds it."""
    write_text(out / f"{result.table}.json", json.dumps(finite_only(result.as_json()), ensure_ascii=False, indent=1) + "\n")


def status_of(paper: Paper, out: Path | None = None) -> list[ItemStatus]:
    return [_item_status(paper, item, out) for item in paper.items]


def count_by_status(found: Iterable[ItemStatus]) -> dict[str, int]:
    found = list(found)
    return {status.value: sum(item.status is status for item in found) for status in Status}


def _item_status(paper: Paper, item: Item, out: Path | None) -> ItemStatus:
    results = [result for table in item.tables if (result := result_of(f"{paper.key}/{table}", out)) is not None]
    agreed, exceeded, short, reasons, notes = 0, 0, 0, list(item.missing), []
    rows, measured = 0, 0
    for result in results:
        judged = [_judge_cell(cell) for cell in result["cells"] if cell["published"] is not None and cell["verdict"] != Agreement.SKIPPED]
        judged += [law["verdict"] == Agreement.REPRODUCED for law in result["laws"] if law["verdict"] != Agreement.SKIPPED]
        agreed, exceeded, short = (count + judged.count(kind) for count, kind in ((agreed, True), (exceeded, None), (short, False)))
        skipped = {cell["row"]: cell["reason"] for cell in result["cells"] if cell["verdict"] == Agreement.SKIPPED}
        reasons += _grouped(skipped)
        names = {cell["row"] for cell in result["cells"]}
        rows, measured = rows + len(names), measured + len(names - skipped.keys())
        cut = [row for row, said in result.get("row_departures", {}).items() if any(CUT in sentence for sentence in said)]
        kept = notes if result["profile"] == "quick" else reasons  # a quick profile has fewer batches than the paper anyway
        kept += [f"{_rows(len(cut))} of {result['table']} {'has' if len(cut) == 1 else 'have'} fewer batches than the profile"] * bool(cut)
    unmeasured = [table for table in item.tables if result_of(f"{paper.key}/{table}", out) is None]
    reasons += [f"{table}: no result is recorded" for table in unmeasured if not item.page]
    return ItemStatus(
        paper=paper.key,
        item=item.name,
        shows=item.shows,
        status=_verdict(item, [result["profile"] for result in results], measured, short, reasons),
        reproduced=agreed,
        exceeded=exceeded,
        fell_short=short,
        rows=rows,
        measured_rows=measured,
        profile=" and ".join(dict.fromkeys(result["profile"] for result in results)),
        commands=tuple(f"dosimeter reproduce {paper.key}/{table}" for table in item.tables),
        reasons=tuple([item.impossible] if item.impossible else [*reasons, *notes, *_causes(item, bool(results))]),
    )


def _grouped(skipped: dict[str, str]) -> list[str]:
    """One sentence for each reason why rows were left out: row -> reason."""
    return [
        f"{names[0] if len(names) == 1 else _rows(len(names)) + f' ({names[0]} to {names[-1]})'}: {reason}"
        for reason in dict.fromkeys(skipped.values())
        if (names := [row for row, own in skipped.items() if own == reason])
    ]


def _rows(number: int) -> str:
    return f"{number} row{'s' * (number != 1)}"


def _causes(item: Item, measured: bool) -> list[str]:
    """The checked causes of what was measured, and where else to look."""
    return [*(item.causes if measured or item.page else ()), *([f"see {item.page}.md"] if item.page else [])]


def _verdict(item: Item, profiles: Sequence[str], measured: int, short: int, reasons: Sequence[str]) -> Status:
    if item.illustration:
        return Status.NOTHING
    if item.impossible:
        return Status.IMPOSSIBLE
    if not measured:
        return Status(item.judged) if item.judged else Status.NOT_YET
    if short or item.judged == Status.SHORT:
        return Status.SHORT
    if reasons:
        return Status.PARTLY
    return Status.QUICK if "quick" in profiles else Status.DONE


def _judge_cell(cell: dict[str, Any]) -> bool | None:
    """True where a number agrees, None where it exceeds the published one, False where it falls short."""
    if cell["verdict"] == Agreement.REPRODUCED:
        return True
    better = Agreement.BELOW if is_error(cell["quantity"]) else Agreement.ABOVE
    return None if cell["verdict"] == better and not COUNT.fullmatch(cell["quantity"]) else False


def _read_paper(key: str, file: Path) -> Paper:
    data = read_toml(file)
    if unknown := sorted(data.keys() - {"title", "source", "items"}):
        raise OptionError(f"{file}: {unknown[0]}", "no such key; keys are: title, source, items")
    check_value(list[dict[str, Any]], data.get("items", []), f"{file}: items")
    items = tuple(construct(Item, item, f"{file}: items[{position}]") for position, item in enumerate(data.get("items", [])))
    for position, item in enumerate(items):
        if strangers := [table for table in item.tables if f"{key}/{table}" not in table_files()]:
            raise OptionError(f"{file}: items[{position}].tables", f"no such table: {key}/{strangers[0]}")
    return Paper(key=key, title=data.get("title", key), source=data.get("source", ""), items=items)
