"""Runs of generator.py as one page with pictures, and as Markdown tables on the terminal.

    python papers/rgla/page.py page.html runs/rgla runs/rgla-more --rows rows.json

Rows are pooled over the records of all runs, each beside its nulls. A row that is not 3 dB above the best of them is marked: there the
decoder, not the gradient, made the picture. Pictures show, for four samples, the truth, what was drawn, what the same attack draws
from a foreign gradient (where that was run), and the nearest auxiliary image. The page shows the data, and so stays beside the runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from rows import LEAKED, grouped, pooled

from dosimeter.records import read_records
from dosimeter.types import Record

COLUMNS = ("truth", "recovered", "foreign", "nearest")
TITLES = {
    "8": "Table 8: equal labels in a batch of 8",
    "9": "Table 9: labels given, recovered, unknown",
    "10": "Table 10: batch sizes",
    "11": "Table 11: a higher resolution",
    "12": "Table 12: compression",
    "2": "Table 2: noise and clipping",
    "": "Private data sets",
}
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem; padding: 0 1rem; color: #1c2430 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #dde2ea }
td:first-child, th:first-child { text-align: left } .not { color: #8a3b12 } .leaks { color: #14652f }
figure { margin: 1rem 0; display: inline-block } img { width: 6.5rem; display: block } figcaption { font-size: .8rem }
.four { display: flex; gap: .2rem }"""


def tables(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by the number of their table."""
    found: dict[str, list[dict[str, Any]]] = {number: [] for number in TITLES}
    for row in rows:
        number, colon, _ = row["row"].partition(":")
        found[number if colon else ""].append(row)
    return {number: sorted(part, key=_order) for number, part in found.items() if part}


def cells(row: dict[str, Any]) -> list[str]:
    """What stands under each of the headings; `3 dB above` counts the images that stand so far above all of their own nulls."""
    nulls = {name: value for name, value in row["nulls"].items() if value is not None}
    best = max(nulls, key=nulls.__getitem__) if nulls else None
    verdict = "" if row["margin"] is None else "leaks" if row["margin"] >= LEAKED else "the decoder's"
    figures = (row["psnr"], row["ssim"], row["lpips"])
    null = "" if best is None else f"{nulls[best]:.1f} {best}"
    margin = "" if row["margin"] is None else f"{row['margin']:+.1f}"
    return [
        row["row"].partition(": ")[2] or row["row"],
        str(row["images"]),
        *(_number(figure) for figure in figures),
        null,
        margin,
        str(row["above"]),
        verdict,
        _number(row["seconds"]),
        _number(row["published"]),
    ]


HEADINGS = ["row", "images", "PSNR", "SSIM", "LPIPS", "best null", "margin", "3 dB above", "picture", "s", "published"]


def markdown(part: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 1)]
    return "\n".join(lines + ["| " + " | ".join(cells(row)) + " |" for row in part])


def page(rows: list[dict[str, Any]], records: dict[str, list[Record]]) -> str:
    body = []
    for number, part in tables(rows).items():
        body.append(f"<h2>{TITLES[number]}</h2>\n<table><tr>{''.join(f'<th>{heading}</th>' for heading in HEADINGS)}</tr>")
        for row in part:
            kind = "leaks" if (row["margin"] or 0) >= LEAKED else "not"
            nulls = escape(", ".join(f"{name} {_number(value)}" for name, value in row["nulls"].items()))
            shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
            body.append(f'<tr class="{kind}" title="nulls: {nulls}">{shown}</tr>')
        body.append("</table>")
        body += [_pictures(record) for row in part for record in records[row["row"]] if record.pictures]
    introduction = (
        f"<p>PSNR in dB, mean over the images. <b>the decoder's</b>: less than {LEAKED:g} dB above the best null, so that the decoder, not "
        "the gradient, made the picture; <b>leaks</b>: above it by that much. All nulls of a row are in its tooltip.</p>"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Pictures from features</title><style>{STYLE}</style>'
    return f"{head}<h1>Pictures from features</h1>{introduction}{''.join(body)}</html>\n"


def _pictures(record: Record) -> str:
    groups = []
    for pictures in record.pictures:
        shown = {name: pictures.get(name) or pictures["nulls"].get(name) for name in COLUMNS}
        images = "".join(
            f'<div><img src="data:image/png;base64,{data}" alt="{name}"><figcaption>{name}</figcaption></div>'
            for name, data in shown.items()
            if data
        )
        groups.append(f'<figure><div class="four">{images}</div></figure>')
    return f"<h3>{escape(record.config['subject']['data'])}</h3>{''.join(groups)}"


def _order(row: dict[str, Any]) -> tuple[str, int]:
    """By method, then as measured: batch sizes and ratios as numbers."""
    digits = "".join(letter for letter in row["row"].partition(":")[2] if letter.isdigit())
    return row["row"].rpartition(", ")[2], int(digits or 0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="RGLA's tables as one page, from the records of runs")
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rows", type=Path, help="write the rows as JSON, too")
    options = parser.parse_args()
    records = grouped(record for folder in options.runs for record in read_records(folder))
    rows = [pooled(name, batches) for name, batches in records.items()]
    options.page.write_text(page(rows, records))
    ordered = tables(rows)
    for number, part in ordered.items():
        sys.stdout.write(f"{TITLES[number]}\n\n{markdown(part)}\n\n")
    if options.rows:
        options.rows.write_text(json.dumps([row for part in ordered.values() for row in part], ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
