"""Runs of generator.py as one page with pictures, and as Markdown tables on the terminal.

    python experiments/rgla/page.py page.html runs/rgla runs/rgla-more

Each row stands beside its nulls. A row that is not 3 dB above the best of them is marked: there the decoder, not the gradient, made the
picture. Pictures show, for four samples, the truth, what was drawn, what the same attack draws from a foreign gradient (where that
was run), and the nearest auxiliary image. The page shows the data, and so stays beside the runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

LEAKED = 3.0  # dB above the best null
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


def read(folders: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, later runs in place of earlier ones of the same name, and the records that have pictures."""
    rows: dict[str, dict[str, Any]] = {}
    records = []
    for folder in folders:
        rows |= {row["row"]: row for row in json.loads((folder / "rows.json").read_text())}
        records += [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return list(rows.values()), [record for record in records if record["pictures"]]


def tables(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by the number of their table."""
    found: dict[str, list[dict[str, Any]]] = {number: [] for number in TITLES}
    for row in rows:
        number, colon, _ = row["row"].partition(":")
        found[number if colon else ""].append(row)
    return {number: sorted(part, key=_order) for number, part in found.items() if part}


def cells(row: dict[str, Any]) -> list[str]:
    """Name, images, PSNR, SSIM, LPIPS, the best null with its name, the margin over it, what that means, seconds, published PSNR."""
    nulls = {name: value for name, value in row["nulls"].items() if value is not None}
    best = max(nulls, key=nulls.__getitem__) if nulls else None
    verdict = "" if row["margin"] is None else "leaks" if row["margin"] >= LEAKED else "the decoder's"
    figures = (row["psnr"], row["ssim"], row["lpips"])
    null = "" if best is None else f"{nulls[best]:.1f} {best}"
    margin = "" if row["margin"] is None else f"{row['margin']:+.1f}"
    return [
        row["row"].partition(": ")[2] or row["row"],
        str(row["samples"]),
        *(_number(figure) for figure in figures),
        null,
        margin,
        verdict,
        _number(row["seconds"]),
        _number(row["published"]),
    ]


HEADINGS = ["row", "images", "PSNR", "SSIM", "LPIPS", "best null", "margin", "picture", "s", "published"]


def markdown(part: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 1)]
    return "\n".join(lines + ["| " + " | ".join(cells(row)) + " |" for row in part])


def page(rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> str:
    body = []
    for number, part in tables(rows).items():
        body.append(f"<h2>{TITLES[number]}</h2>\n<table><tr>{''.join(f'<th>{heading}</th>' for heading in HEADINGS)}</tr>")
        for row in part:
            kind = "leaks" if (row["margin"] or 0) >= LEAKED else "not"
            nulls = escape(", ".join(f"{name} {_number(value)}" for name, value in row["nulls"].items()))
            shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
            body.append(f'<tr class="{kind}" title="nulls: {nulls}">{shown}</tr>')
        body.append("</table>")
        names = {row["row"] for row in part}
        body += [_pictures(record) for record in records if _row_of(record) in names]
    introduction = (
        f"<p>PSNR in dB, mean over the images. <b>the decoder's</b>: less than {LEAKED:g} dB above the best null, so that the decoder, not "
        "the gradient, made the picture; <b>leaks</b>: above it by that much. All nulls of a row are in its tooltip.</p>"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Pictures from features</title><style>{STYLE}</style>'
    return f"{head}<h1>Pictures from features</h1>{introduction}{''.join(body)}</html>\n"


def _pictures(record: dict[str, Any]) -> str:
    groups = []
    for pictures in record["pictures"]:
        shown = {name: pictures.get(name) or pictures["nulls"].get(name) for name in COLUMNS}
        images = "".join(
            f'<div><img src="data:image/png;base64,{data}" alt="{name}"><figcaption>{name}</figcaption></div>'
            for name, data in shown.items()
            if data
        )
        groups.append(f'<figure><div class="four">{images}</div></figure>')
    return f"<h3>{escape(record['config']['subject']['data'])}</h3>{''.join(groups)}"


def _row_of(record: dict[str, Any]) -> str:
    return record["config"]["subject"]["data"].rpartition(", batch ")[0]


def _order(row: dict[str, Any]) -> tuple[str, int]:
    """By method, then as measured: batch sizes and ratios as numbers."""
    digits = "".join(letter for letter in row["row"].partition(":")[2] if letter.isdigit())
    return row["row"].rpartition(", ")[2], int(digits or 0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    rows, records = read([Path(word) for word in sys.argv[2:]])
    Path(sys.argv[1]).write_text(page(rows, records))
    for number, part in tables(rows).items():
        sys.stdout.write(f"{TITLES[number]}\n\n{markdown(part)}\n\n")
