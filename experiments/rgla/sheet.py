"""A run of generator.py as one picture and one table.

    python experiments/rgla/sheet.py runs/rgla sheet.png

Each row of the picture is one row of the run: for four samples the truth, what was drawn, what the same attack draws from a foreign
gradient (where that was run), and the nearest auxiliary image.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

from PIL import Image

SIDE, SAMPLES, GAP = 112, 4, 8
COLUMNS = ("truth", "recovered", "foreign", "nearest")


def sheet(records: list[dict], destination: Path) -> None:
    shown = [record for record in records if record["pictures"]]
    width = SAMPLES * (len(COLUMNS) * SIDE + GAP)
    canvas = Image.new("RGB", (width, len(shown) * (SIDE + GAP)), "white")
    for row, record in enumerate(shown):
        for sample, pictures in enumerate(record["pictures"][:SAMPLES]):
            for column, name in enumerate(COLUMNS):
                data = pictures.get(name) or pictures["nulls"].get(name)
                if data is not None:
                    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").resize((SIDE, SIDE))
                    canvas.paste(picture, (sample * (len(COLUMNS) * SIDE + GAP) + column * SIDE, row * (SIDE + GAP)))
        sys.stdout.write(f"{row}: {record['config']['subject']['data']}\n")
    canvas.save(destination, quality=88)


def table(rows: list[dict]) -> str:
    """Markdown: the mean PSNR of a row, what is published, and every null."""
    names = list(dict.fromkeys(name for row in rows for name in row["nulls"]))
    lines = ["| row | images | PSNR | SSIM | LPIPS | " + " | ".join(names) + " | margin | s | published |"]
    lines.append("|---|" + "---:|" * (len(names) + 7))
    for row in rows:
        cells = [row["row"], row["samples"], row["psnr"], row["ssim"], row["lpips"]]
        cells += [row["nulls"].get(name) for name in names] + [row["margin"], row["seconds"], row["published"]]
        lines.append(
            "| " + " | ".join("" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sheet([json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()], Path(sys.argv[2]))
    sys.stdout.write(table(json.loads((folder / "rows.json").read_text())) + "\n")
