"""Configurations: dataclass ⇄ TOML ⇄ `key=value` ⇄ JSON, exact both ways, with errors that name the path."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from dosimeter.artefacts import fingerprint
from dosimeter.interfaces import Method
from dosimeter.options import OptionError, checked, mismatch, type_name
from dosimeter.registry import METHODS, SAMPLERS, Registry, build

Config = TypeVar("Config")


def describe(value: Any) -> Any:
    """Plain JSON for a configuration: a method becomes its name and options, an absent value is left out."""
    if isinstance(value, Method):
        return {"name": value.name, **_described_fields(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _described_fields(value)
        return fields.pop("options", {}) | fields
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def construct(kind: type[Config], data: Any, path: str = "") -> Config:
    """The configuration that `data` describes; the inverse of `describe`."""
    return _construct(kind, data, path)


def read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: expected a TOML file, got a folder") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def override(data: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`data` with `dotted.key=value` assignments applied; values are TOML, or plain text where they are not."""
    result = json.loads(json.dumps(describe(data)))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"expected key=value, got {assignment!r}")
        *parents, last = key.strip().split(".")
        table = result
        for depth, parent in enumerate(parents):
            child = _item(table, parent)
            if isinstance(child, str):  # `attack = "dlg"` is short for a table with that name
                child = {"name": child}
            if not isinstance(child, (dict, list)):
                if child is not None or isinstance(table, list):
                    raise ValueError(f"{'.'.join(parents[: depth + 1])}: is not a table, so {key.strip()!r} cannot be set")
                child = {}
            table = _put(table, parent, child, key)
        _put(table, last, _parsed(text), key)
    return result


def to_toml(config: Any) -> str:
    """TOML text for a configuration; `construct(kind, tomllib.loads(text))` gives it back."""
    lines: list[str] = []
    _write_table(lines, (), describe(config))
    return "\n".join(lines).strip() + "\n"


def digest(config: Any) -> str:
    """A key for a configuration: the same for the same content, whatever the order of its fields."""
    canonical = json.dumps(describe(config), sort_keys=True, separators=(",", ":"))
    return fingerprint(canonical)


def _described_fields(value: Any) -> dict[str, Any]:
    items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: describe(item) for name, item in items.items() if item is not None}


def _construct(annotation: Any, data: Any, path: str) -> Any:
    registry = _registry_of(annotation)
    if registry is not None:
        return _construct_method(registry, data, path)
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _construct_union(annotation, members, data, path)
    if origin is tuple and len(members) == 2 and members[1] is Ellipsis:
        if not isinstance(data, (list, tuple)):
            raise mismatch(path, "a list", data)
        return tuple(_construct(members[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if dataclasses.is_dataclass(annotation) and not isinstance(data, typing.cast(type, annotation)):
        return _construct_dataclass(typing.cast(type, annotation), data, path)
    return checked(annotation, data, path)


def _construct_method(registry: Registry[Any], data: Any, path: str) -> Any:
    if registry.interface is not None and isinstance(data, registry.interface):
        return data
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise mismatch(path, f"the name of a {registry.kind}, or a table with its `name` and options", data)
    options = {key: value for key, value in data.items() if key != "name"}
    return build(registry.entry(data["name"], path), options, path)


def _construct_union(annotation: Any, members: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in members:
        return None
    errors: list[OptionError] = []
    for member in members:
        if member is type(None):
            continue
        try:
            return _construct(member, data, path)
        except OptionError as error:
            errors.append(error)
    structured = [e for m, e in zip([m for m in members if m is not type(None)], errors) if _is_structured(m)]
    if len(structured) == 1 and not (isinstance(data, str) and _accepts_text(members)):
        raise structured[0]
    if len(errors) == 1:
        raise errors[0]
    raise structured[0] if structured else mismatch(path, type_name(annotation), data)


def _construct_dataclass(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise mismatch(path, "a table", data)
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    known = {key: value for key, value in data.items() if key in fields and key != "options"}
    extra = {key: value for key, value in data.items() if key not in known}
    if extra and "options" not in fields:
        name = next(iter(extra))
        close = get_close_matches(name, fields, 1)
        raise OptionError(
            _join(path, name), f"no such key; did you mean {close[0]!r}?" if close else f"no such key; keys are: {', '.join(fields)}"
        )
    arguments = {key: _construct(fields[key], value, _join(path, key)) for key, value in known.items()}
    if "options" in fields:
        arguments["options"] = extra.pop("options", {}) | extra
    try:
        return kind(**arguments)
    except OptionError as error:
        raise error.under(path) from None


def _registry_of(annotation: Any) -> Registry[Any] | None:
    if not isinstance(annotation, type):
        return None
    return next((registry for registry in (*METHODS, SAMPLERS) if registry.interface is annotation), None)


def _is_structured(annotation: Any) -> bool:
    return _registry_of(annotation) is not None or dataclasses.is_dataclass(annotation) or typing.get_origin(annotation) is tuple


def _accepts_text(members: tuple[Any, ...]) -> bool:
    return any(member is str for member in members)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _item(table: Any, key: str) -> Any:
    if isinstance(table, list):
        return table[int(key)] if key.isdigit() and int(key) < len(table) else None
    return table.get(key)


def _put(table: Any, key: str, value: Any, path: str) -> Any:
    if isinstance(table, list):
        if not key.isdigit() or int(key) >= len(table):
            raise ValueError(f"{path.strip()}: expected an index below {len(table)}, got {key!r}")
        table[int(key)] = value
    else:
        table[key] = value
    return value


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _write_table(lines: list[str], path: tuple[str, ...], table: dict[str, Any]) -> None:
    nested = {k: v for k, v in table.items() if isinstance(v, dict) or (isinstance(v, list) and v and all(isinstance(i, dict) for i in v))}
    for key, value in table.items():
        if key not in nested:
            lines.append(f"{_key(key)} = {_literal(value)}")
    for key, value in nested.items():
        heading = ".".join(map(_key, (*path, key)))
        for item in value if isinstance(value, list) else [value]:
            lines.append("")
            lines.append(f"[[{heading}]]" if isinstance(value, list) else f"[{heading}]")
            _write_table(lines, (*path, key), item)


def _key(key: str) -> str:
    return key if key and all(c.isalnum() or c in "-_" for c in key) and key.isascii() else json.dumps(key)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)
