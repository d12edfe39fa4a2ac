"""Records as a table for those who go on computing: one row a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dosimeter.report.settings import describe_part
from dosimeter.report.words import higher_is_better
from dosimeter.surfaces.intervals import summarize
from dosimeter.types import Record

FACTS = ("model", "data", "mode", "batch_size", "labels", "accuracy")  # of the threat model


def records_to_pandas(records: Sequence[Record]) -> Any:
    """A DataFrame with the setting, the verdict and the median of every metric; a statistic that is a miss is missing."""
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed here: pip install pandas") from None
    return pandas.DataFrame([as_row(record) for record in records])


def as_row(record: Record) -> dict[str, Any]:
    """A record as plain values: what was measured, under which conditions, and what came out."""
    facts = {name: record.threat_model.get(name) for name in FACTS}
    defenses = ", then ".join(describe_part(part) for part in record.threat_model.get("defenses") or []) or "none"
    medians = {name: summarize(values, higher_is_better(name)).median for name, values in record.metrics.items() if values}
    told = {"surface": record.surface, "method": record.method, "verdict": record.verdict, "outcome": record.outcome}
    return (
        told
        | facts
        | {"defenses": defenses, "seed": record.seed, **medians, "seconds": record.seconds, "reason": record.reason, "key": record.key}
    )
