"""Settings: records that share a threat model, and the lines that describe it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dosimeter.report.words import THREAT_MODEL, part_idea
from dosimeter.surfaces.surface import surface_named
from dosimeter.types import Record

OF_THE_METHOD = frozenset({"labels", "needs", "auxiliary"})  # may differ between the methods of one setting
OF_THE_DRAW = frozenset(
    {"seed", "accuracy", "accuracy_on", "model_hash", "batch_hash", "update_hash"}
)  # may differ between the seeds of one setting
OF_THE_DRAW |= {"directions", "directions_so_far", "epsilon_so_far", "privacy"}  # measured on the update, and shown as the dose
TOLD_ELSEWHERE = frozenset({"batch_size_declared", "accuracy_on", "model_hash", "batch_hash", "needs", "privacy"})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The records of one threat model, named by what differs from the other settings on the page."""

    name: str  # "" where there is one setting only
    records: list[Record]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the threat model: its name, every value that occurs, and what it means."""

    name: str
    values: list[str]
    note: str


def group_by_setting(records: Sequence[Record]) -> list[Setting]:
    """Records grouped by their threat model, apart from its parts that belong to the method, in order of appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        shared = {key: value for key, value in record.threat_model.items() if key not in OF_THE_METHOD | OF_THE_DRAW}
        groups.setdefault(json.dumps(shared, sort_keys=True, default=str), []).append(record)
    differing = [
        key
        for key in _ordered_keys(records)
        if key not in OF_THE_METHOD | OF_THE_DRAW and len({_value(key, group[0].threat_model) for group in groups.values()}) > 1
    ]
    return [Setting(name=_setting_name(differing, group[0].threat_model), records=group) for group in groups.values()]


def threat_model_lines(records: Sequence[Record]) -> list[Line]:
    """The threat model of all records; a line with several values lists them all."""
    lines = []
    for key in _ordered_keys(records):
        if key in TOLD_ELSEWHERE:
            continue
        values = _label_sources(records) if key == "labels" else _values(key, records)
        name, note = THREAT_MODEL.get(key, (key.replace("_", " ").capitalize(), ""))
        lines.append(Line(name=name, values=values, note=note or _ideas(key, records)))
    needs = dict.fromkeys(str(need) for record in records for need in _as_list(record.threat_model.get("needs")))
    if needs:
        lines.append(Line(name=THREAT_MODEL["needs"][0], values=[", ".join(needs)], note=THREAT_MODEL["needs"][1]))
    return [line for line in lines if line.values]


def describe_part(part: Any) -> str:
    """A method as its name and its options: `gaussian_noise (std 0.01)`."""
    if not isinstance(part, dict):
        return str(part)
    options = {key: value for key, value in part.items() if key != "name"}
    name = str(part.get("name", ""))
    listed = ", ".join(f"{key.replace('_', ' ')} {_scalar(value)}" for key, value in options.items())
    return f"{name} ({listed})" if name and listed else name or listed


def _setting_name(differing: Iterable[str], threat_model: dict[str, Any]) -> str:
    parts = []
    for key in differing:
        value = _value(key, threat_model)
        if key == "defenses":
            parts.append(value if value != "none" else "no defense")
        elif value:
            parts.append(f"{THREAT_MODEL.get(key, (key.replace('_', ' '), ''))[0].lower()} {value}")
    return "; ".join(parts)


def _value(key: str, threat_model: dict[str, Any]) -> str:
    value = threat_model.get(key)
    if key == "defenses":
        return ", then ".join(describe_part(defense) for defense in _as_list(value)) or "none"
    if value is None:
        return "not known" if key in ("accuracy", "batch_size") else ""
    if key == "accuracy" and isinstance(value, (int, float)):
        return f"{100 * value:.1f}\u202f%" + (f" of {threat_model['accuracy_on']}" if threat_model.get("accuracy_on") else "")
    if key == "mode":
        return {"eval": "evaluation", "train": "training"}.get(str(value), str(value))
    if key == "input_shape":
        return " × ".join(str(side) for side in _as_list(value))
    if key == "batch_size":
        declared = threat_model.get("batch_size_declared")
        return f"{value}" + ("" if declared is None else ", declared to the server" if declared else ", not declared to the server")
    if key == "auxiliary":
        return "none" if value == 0 else _scalar(value)
    return describe_part(value) if isinstance(value, dict) else _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_scalar(item) for item in value)
    return describe_part(value) if isinstance(value, dict) else str(value)


def _values(key: str, records: Sequence[Record]) -> list[str]:
    return list(filter(None, dict.fromkeys(_value(key, record.threat_model) for record in records if key in record.threat_model)))


def _label_sources(records: Sequence[Record]) -> list[str]:
    """The sources of the labels, each with the methods that used it."""
    methods: dict[str, dict[str, None]] = {}
    for record in records:
        if surface_named(record.surface).takes_labels and (source := _value("labels", record.threat_model)):
            methods.setdefault(source, {})[record.method] = None
    return [f"{source} ({', '.join(names)})" for source, names in methods.items()]


def _ordered_keys(records: Sequence[Record]) -> list[str]:
    present = dict.fromkeys(key for record in records for key in record.threat_model)
    return [key for key in THREAT_MODEL if key in present] + [key for key in present if key not in THREAT_MODEL]


def _ideas(key: str, records: Sequence[Record]) -> str:
    parts = [part for record in records for part in _as_list(record.threat_model.get(key)) if isinstance(part, dict)]
    names = dict.fromkeys(str(part.get("name", "")) for part in parts)
    return " ".join(filter(None, (part_idea(key, name) for name in names)))


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
