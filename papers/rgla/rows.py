"""Records of several batches as one row of a table: means over all images, beside their nulls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dosimeter.types import Record

COMPARED = 64  # images that every row of Table 10 shows, which are compared between batch sizes
LEAKED = 3.0  # dB above the best null


def grouped(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by their row; of two of the same batch the later one counts."""
    rows: dict[str, dict[str, Record]] = {}
    for record in records:
        name, _, number = record.config["subject"]["data"].rpartition(", batch ")
        rows.setdefault(name, {})[number] = record
    return {name: [batches[number] for number in sorted(batches, key=int)] for name, batches in rows.items()}


def pooled(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """One row; `first_64` is the mean over the images that every batch size shows, `margin` what the PSNR is above the best null."""
    scores = [value for record in records for value in record.metrics.get("psnr", ())]
    nulls = list(dict.fromkeys(null for record in records for null in record.nulls))
    found: dict[str, Any] = {"row": name, "images": len(scores)}
    for metric in ("psnr", "ssim", "lpips"):
        found[metric] = _mean([value for record in records for value in record.metrics.get(metric, ())])
    found["first_64"] = _mean(scores[:COMPARED])
    found["nulls"] = {null: _mean([v for record in records for v in record.nulls.get(null, {}).get("psnr", ())]) for null in nulls}
    best = max((value for value in found["nulls"].values() if value is not None), default=None)
    found["margin"] = None if best is None or found["psnr"] is None else round(found["psnr"] - best, 3)
    found["above"] = sum(_stands_out(record) for record in records)
    found["seconds"] = _mean([record.seconds for record in records])
    found["published"] = records[-1].config["subject"].get("published")
    found["said"] = records[-1].details.get("message", "") if records[-1].metrics else records[-1].reason
    found["warnings"] = sorted({warning for record in records for warning in record.warnings})
    return found


def _stands_out(record: Record) -> int:
    """How many images are drawn 3 dB better than every one of their own nulls."""
    columns = [null["psnr"] for null in record.nulls.values() if "psnr" in null]
    bests = [max((value for value in values if value is not None), default=float("inf")) for values in zip(*columns)]
    return sum(value is not None and value >= best + LEAKED for value, best in zip(record.metrics.get("psnr", ()), bests))


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None and value == value]
    return round(sum(found) / len(found), 3) if found else None
