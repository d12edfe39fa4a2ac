"""What a record may hold. Records come back from files that anyone can change, so every value that is used later is checked."""

# ruff: noqa: UP007, UP045  (pyright takes no `|` between an Annotated type and None outside of an annotation)

from __future__ import annotations

import json
from typing import Any, Optional, Union

from dosimeter.options import FiniteFloat, Fraction, NonNegativeInt, OptionError, check_value, field_types, mismatch
from dosimeter.types import Evidence, Outcome, Record

DEEPEST_VALUE = 32  # lists or tables within one another
LARGEST_NUMBER = 1e300  # a sum of a few such numbers stays finite
Texts = list[str]
Parts = list[dict[str, Any]]
Number = float | None

# The facts that the report, the gate and the next run use. Further facts may have any plain value.
THREAT_MODEL: dict[str, Any] = {
    "model": str,
    "data": str,
    "stage": str,
    "mode": str,
    "accuracy": Optional[Fraction],
    "accuracy_on": str | None,
    "batch_size": Optional[NonNegativeInt],
    "batch_size_declared": bool | None,
    "defenses": Parts,
    "labels": str,
    "truth": str,
    "round": Optional[NonNegativeInt],
    "client": str,
    "directions": Optional[NonNegativeInt],
    "directions_so_far": Optional[NonNegativeInt],
    "epsilon_so_far": Number,
    "privacy": Parts,
    "needs": Texts,
}
DETAILS: dict[str, Any] = {
    "ceiling": dict[str, Any],
    "proved_samples": list[bool],
    "certified": Union[bool, NonNegativeInt],
    "false_certificates": NonNegativeInt,
    "chance": Optional[Fraction],
    "confidence": Number,
    "batch_size": Optional[NonNegativeInt],
    "complete": bool | None,
    "counters": Texts,
    "guarantees": Parts,
    "guessing": Number,
    "identifiability": Texts,
    "largest_ceiling": Number,
    "message": str,
    "left_out": bool,
    "objective": Number,
    "objective_at_truth": Number,
    "spared_nulls": Texts,
    "theorem": str,
    "unavailable": dict[str, str],
}
GUARANTEE: dict[str, Any] = {"epsilon": Number, "delta": Number, "unit": str, "source": str}
READING: dict[str, Any] = {
    "setting": str,
    "rounds": NonNegativeInt,
    "unit": str,
    "change": str,
    "against": str,
    "reason": str,
    "behind": bool,
}
READING |= {"reason": str, "behind": bool} | dict.fromkeys(("stated", "proved", "shown", "delta", "found"), Number)
EVIDENCE: dict[str, Any] = field_types(Evidence)
EXACT: dict[str, Any] = {"outcome": Outcome, "seconds": FiniteFloat}  # narrower than the type of the record's field


def parse_record(line: bytes | str) -> Record:
    """The record in one line of JSON. What does not fit is an OptionError or a ValueError."""
    try:
        data = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    if not isinstance(data, dict):
        raise mismatch("", "a table", data)
    check_plain(data, "")
    if "pictures" in data:
        data["evidence"] = [_from_picture(row) for row in data.pop("pictures")]
    annotations = field_types(Record)
    if unknown := [name for name in data if name not in annotations]:
        raise TypeError(f"unknown field {unknown[0]!r}")
    try:
        record = Record(**{name: check_value(annotations[name], value, name) for name, value in data.items()})
    except TypeError as error:  # a field is missing
        raise TypeError(str(error).removeprefix("Record.__init__() ")) from None
    for name, annotation in EXACT.items():
        check_value(annotation, getattr(record, name), name)
    _check_table(THREAT_MODEL, record.threat_model, "threat_model")
    _check_table(DETAILS, record.details, "details")
    for position, guarantee in enumerate(record.details.get("guarantees", [])):
        _check_table(GUARANTEE, guarantee, f"details.guarantees[{position}]")
    for position, reading in enumerate(record.threat_model.get("privacy", [])):
        _check_table(READING, reading, f"threat_model.privacy[{position}]")
    for position, shown in enumerate(record.evidence):
        path = f"evidence[{position}]"
        if missing := {"kind", "recovered"} - set(shown):
            raise OptionError(path, f"lacks {', '.join(sorted(missing))}")
        _check_table(EVIDENCE, shown, path)
    _check_lengths(record)
    return record


def _from_picture(row: Any) -> Any:
    """A row of pictures, as records before 0.2 hold it, as evidence."""
    if not isinstance(row, dict) or "truth" not in row:
        return row
    score = next((value for name, value in row.items() if name not in ("truth", "recovered", "nulls")), None)
    kind = "tiles" if "map_error" in row else "image"
    return {"kind": kind, "private": row["truth"], "recovered": row.get("recovered"), "nulls": row.get("nulls", {}), "score": score}


def check_plain(value: Any, path: str, depth: int = 0) -> None:
    """Refuse numbers that overflow, and values within values without end."""
    if depth > DEEPEST_VALUE:
        raise OptionError(path, f"lists or tables are nested more than {DEEPEST_VALUE} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            check_plain(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            check_plain(item, f"{path}[{position}]", depth + 1)
    elif isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:
        raise mismatch(path, f"a number up to {LARGEST_NUMBER:g}", value)
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise OptionError(path, "holds half a character, which no file can be written with")


def _check_table(known: dict[str, Any], table: dict[str, Any], path: str) -> None:
    for name, value in table.items():
        if name in known:
            check_value(known[name], value, f"{path}.{name}")


def _check_lengths(record: Record) -> None:
    """Every metric has a value a sample, and every null has one for each of them."""
    for name, values in record.metrics.items():
        if not values:
            raise OptionError(f"metrics.{name}", "expected at least one value, got none")
    for null, columns in record.nulls.items():
        for name, values in columns.items():
            wanted = len(record.metrics.get(name, values))
            if len(values) != wanted:
                raise OptionError(f"nulls.{null}.{name}", f"expected {wanted} values as in metrics.{name}, got {len(values)}")


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"expected a finite number, got {word}")
