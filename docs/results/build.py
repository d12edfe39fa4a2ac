# ruff: noqa: T201
"""Write docs/results/*.md, the pages of what was measured, from the records beside this file.

    python docs/results/build.py            # write the pages
    python docs/results/build.py --check    # say which pages are not what the records give, and fail

A page is one file `records/<page>.toml`, or a paper: its items from `papers/<paper>.toml`, the results of its tables from
`records/reproductions`, and the facts of `records/<paper>.toml`. The README here explains the keys of a record.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from dosimeter.runs.reproduction.inventory import ItemStatus, Paper, count_by_status, papers, result_of, status_of, tables_of

HERE = Path(__file__).resolve().parent
PAGE_KEYS = {"title", "about", "order", "defaults", "facts"}
PROVENANCE = ("command", "seeds", "machine", "version")
FACT_KEYS = {"title", "setting", "columns", "rows", "values", "from", "where", "summary", "findings", "measured", *PROVENANCE}
REQUIRED = ("title", "command", "seeds")
SHOWN_OF_CELL = ("row", "column", "quantity", "published", "measured", "standard_error", "trials", "verdict")

LONGEST_NUMBER = 8  # characters; longer ones are rounded to four digits


class RecordError(ValueError):
    """A record that no page can be written from, with the place of the mistake."""


def pages(folder: Path = HERE) -> dict[Path, str]:
    """Every page with its text, and the index. The papers have their pages here alone."""
    contents = {file.stem: _read(file) for file in sorted((folder / "records").glob("*.toml"))}
    for key, paper in papers().items() if folder == HERE else ():
        contents[key] = {"facts": [], "order": 1, **contents.get(key, {}), "title": paper.title, "paper": paper}
    written = {folder / f"{name}.md": page(data, name, folder / "records") for name, data in contents.items()}
    written[folder / "README.md"] = index((folder / "index.md").read_text(), contents)
    return written


def page(data: dict[str, Any], name: str, records: Path) -> str:
    """One page: what it is about, then each fact with where it comes from, its numbers and what they show."""
    parts = [f"# {data['title']}", f"<!-- written by docs/results/build.py from records/{name}.toml; change that file -->"]
    if "paper" in data:
        parts += _paper(data["paper"])
    parts += _paragraphs(data.get("about", ""))
    for position, fact in enumerate(data["facts"]):
        parts += _fact({**data.get("defaults", {}), **fact}, f"{name}.facts[{position}]", records)
    return "\n\n".join(parts) + "\n"


def index(text: str, contents: dict[str, dict[str, Any]]) -> str:
    """The hand-written introduction with the list of pages below it."""
    ordered = sorted(contents, key=lambda name: (contents[name].get("order", 99), name))
    lines = [f"| [{contents[name]['title']}]({name}.md) | {_measurements(contents[name])} |" for name in ordered]
    return "\n".join([text.rstrip(), "", "| page | measurements |", "|---|---:|", *lines, ""])


def _measurements(data: dict[str, Any]) -> int:
    """The facts of a page, and the tables of its paper that were run."""
    tables = tables_of(data["paper"].key) if "paper" in data else []
    return len(data["facts"]) + sum(result_of(table) is not None for table in tables)


def _paper(paper: Paper) -> list[str]:
    """A paper's items with their status, then every table that was run: published beside measured, and the departures."""
    found = status_of(paper)
    counted = ", ".join(f"{number} {status}" for status, number in count_by_status(found).items() if number)
    rows = [
        [item.item, item.shows, ", ".join(f"`{command}`" for command in item.commands), item.status, _counts(item), "; ".join(item.reasons)]
        for item in found
    ]
    parts = [
        f"{paper.source}. {len(found)} items: {counted}. `dosimeter reproduce --status {paper.key}` prints this list, and "
        "[the guide](../guide/reproducing.md) explains its words.",
        _table(["item", "shows", "command", "status", "agree / exceeded / short", "why"], rows),
    ]
    for table in tables_of(paper.key):
        if (result := result_of(table)) is not None:
            quick = " --quick" if result["profile"] == "quick" else ""
            parts += [
                f"## `{table}`",
                _provenance(
                    {
                        "command": f"dosimeter reproduce {table}{quick} --seed {result['seed']} --data DIR",
                        "seeds": f"{result['seed']} and the next ones, one a batch",
                        "machine": result["device"],
                        "version": result["version"],
                    }
                ),
                *_summary(result),
            ]
    return parts


def _counts(item: ItemStatus) -> str:
    return f"{item.reproduced} / {item.exceeded} / {item.fell_short} ({item.profile})" if item.profile else ""


def _read(file: Path) -> dict[str, Any]:
    data = tomllib.loads(file.read_text())
    if unknown := sorted(data.keys() - PAGE_KEYS):
        raise RecordError(f"{file.stem}.{unknown[0]}: no such key; keys of a page are: {', '.join(sorted(PAGE_KEYS))}")
    if not data.get("title") or not data.get("facts"):
        raise RecordError(f"{file.stem}: expected a title and [[facts]]")
    return data


def _fact(fact: dict[str, Any], path: str, records: Path) -> list[str]:
    if "measured" in fact:
        fact = json.loads((records / fact["measured"]).read_text(encoding="utf-8")) | fact
    if unknown := sorted(fact.keys() - FACT_KEYS):
        raise RecordError(f"{path}.{unknown[0]}: no such key; keys of a fact are: {', '.join(sorted(FACT_KEYS))}")
    if missing := [key for key in REQUIRED if key not in fact]:
        raise RecordError(f"{path}.{missing[0]}: expected a value; a command or seeds that nobody noted are 'not recorded'")
    parts = [f"## {fact['title']}", _provenance(fact), *_paragraphs(fact.get("setting", ""))]
    if "summary" in fact:
        parts += _summary(json.loads((records / fact["summary"]).read_text()))
    if "from" in fact:
        parts.append(_table(*_selected(fact, json.loads((records / fact["from"]).read_text()))))
    elif "columns" in fact:
        parts.append(_table(fact["columns"], _checked_rows(fact, path)))
    if "values" in fact:
        parts.append(_table(["quantity", "value"], [[value["name"], _with_unit(value)] for value in fact["values"]]))
    if findings := fact.get("findings"):
        parts.append("\n".join(f"- {finding.strip()}" for finding in findings))
    return parts


def _provenance(fact: dict[str, Any]) -> str:
    """Command, seeds, machine and version as a list; what was not noted says so."""
    lines = []
    for key in PROVENANCE:
        value = fact.get(key, "not recorded")
        listed = value if isinstance(value, list) else [value]
        words = [f"`{word}`" if key == "command" and word != "not recorded" else str(word) for word in listed]
        lines.append(f"- {key}: {', '.join(words)}")
    return "\n".join(lines)


def _checked_rows(fact: dict[str, Any], path: str) -> list[list[Any]]:
    for position, row in enumerate(fact.get("rows", [])):
        if len(row) != len(fact["columns"]):
            raise RecordError(f"{path}.rows[{position}]: expected {len(fact['columns'])} entries, got {len(row)}")
    return fact.get("rows", [])


def _selected(fact: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Rows of a JSON file: `columns` maps dotted keys to headings, `where` is a word that the row's name starts with."""
    columns = fact["columns"]
    chosen = [row for row in rows if str(row.get("row", "")).startswith(fact.get("where", ""))]
    return list(columns.values()), [[_within(row, key) for key in columns] for row in chosen]


def _within(row: dict[str, Any], dotted: str) -> Any:
    value: Any = row
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _summary(result: dict[str, Any]) -> list[str]:
    """What `dosimeter reproduce --json` printed: numbers, laws and departures."""
    parts = [f"{result['table']}, {result['profile']} profile: {result['title']}. Source: {result['source']}"]
    if result["cells"]:
        parts.append(
            _table([name.replace("_", " ") for name in SHOWN_OF_CELL], [[c[name] for name in SHOWN_OF_CELL] for c in result["cells"]])
        )
    if result["laws"]:
        parts.append(_table(["law", "verdict", "reason"], [[law["says"], law["verdict"], law["reason"]] for law in result["laws"]]))
    if result["departures"]:
        parts.append("Departures:\n\n" + "\n".join(f"- {departure}" for departure in result["departures"]))
    return parts


def _with_unit(value: dict[str, Any]) -> str:
    return f"{_cell(value['value'])} {value.get('unit', '')}".strip()


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(value) if len(str(value)) <= LONGEST_NUMBER else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _paragraphs(text: str) -> list[str]:
    return [text.strip()] if text.strip() else []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is out of date")
    options = parser.parse_args(arguments)
    stale = [file for file, text in pages().items() if not file.exists() or file.read_text() != text]
    for file in stale:
        print(f"{file.name}: {'not what the records give' if options.check else 'written'}")
        if not options.check:
            file.write_text(pages()[file])
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
