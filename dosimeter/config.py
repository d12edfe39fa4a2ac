"""Configurations: dataclass ⇄ TOML ⇄ `key=value` ⇄ JSON, lossless both ways. Errors name the path of the option."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from dosimeter.artefacts import fingerprint
from dosimeter.files import read_text
from dosimeter.interfaces import Method
from dosimeter.options import OptionError, check_value, field_types, mismatch, type_name
from dosimeter.registry import REGISTRY_OF, Registry, refuse_renamed, suggestion, with_article

Config = TypeVar("Config")

DEEPEST_TABLE = 32  # tables or lists within one another
MOST_BITS = 1024  # of a whole number; more than any float holds
LONGEST_PATH = 80  # characters of an option's path in a message
_TOKEN = re.compile(  # of TOML: what may stand between the dots of a key is a part; an unclosed text ends where the parser gives up
    r""""{3}(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)|\#[^\n]*"""
    r"""|(?P<part>"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\w-]+)|(?P<dot>[ \t]*\.[ \t]*)|.""",
    re.DOTALL,
)


class Surfaced(ABC):
    """A configuration whose methods stand under the keys of their surfaces in a file, and in one field, `method` or `methods`, here."""

    @classmethod
    @abstractmethod
    def method_types(cls) -> dict[str, Any]:
        """The key of each surface, and the type of what stands there."""

    @classmethod
    @abstractmethod
    def collect_methods(cls, by_key: dict[str, Any]) -> dict[str, Any]:
        """The field, as an argument of the constructor, from what stands under each key."""

    @abstractmethod
    def by_surface(self) -> dict[str, Any]:
        """The inverse of `collect_methods`: what stands under each key."""


def describe(value: Any) -> Any:
    """Plain JSON for a configuration: a method becomes its name and options, an absent value is left out."""
    if isinstance(value, Method):
        return {"name": value.name, **_describe_fields(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _describe_fields(value)
        if isinstance(value, Surfaced):
            fields = {name: item for name, item in fields.items() if name not in ("method", "methods")} | describe(value.by_surface())
        return fields.pop("options", {}) | fields
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if callable(value):  # a loss of the caller's own
        return getattr(value, "__qualname__", None) or repr(value)
    return str(value) if isinstance(value, Path) else value


def construct(kind: type[Config], data: Any, path: str = "") -> Config:
    """The configuration that `data` describes; the inverse of `describe`."""
    return check_value(kind, data, path, _build)


def read_toml(path: str | Path) -> dict[str, Any]:
    try:
        content = _parse_toml(read_text(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    try:
        _refuse_odd_values(content, "")
    except OptionError as error:
        raise ValueError(f"{path}: {error}") from None
    return content


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A file's content with its relative paths taken from the file's folder: `model.weights`, `data.name` and every `decoder`.

    A data set's name counts as a path where it looks like one or stands beside the file; else it is a bundled set.
    """

    def beside(text: str) -> str:
        return text if text.startswith("~") or Path(text).is_absolute() else str(folder / text)

    def visit(value: Any, key: str, parent: str) -> Any:
        if isinstance(value, dict):
            return {name: visit(item, name, key) for name, item in value.items()}
        if isinstance(value, list):
            return [visit(item, key, parent) for item in value]
        if not isinstance(value, str) or "\0" in value:
            return value
        if (parent, key) == ("model", "weights") or key == "decoder":
            return beside(value)
        named = (parent, key) == ("data", "name") or (parent, key) == ("", "data")
        if named and ("/" in value or "\\" in value or Path(value).suffix or (folder / value).exists()):
            return beside(value)
        return value

    return visit(data, "", "")


def override(data: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`data` with `dotted.key=value` assignments applied. A value that is not valid TOML is plain text."""
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
        value = _parse_value(text)
        _refuse_odd_values(value, key.strip())
        _put(table, last, value, key)
    return result


def digest(config: Any) -> str:
    """A key for a configuration: the same for the same content, whatever the order of its fields."""
    canonical = json.dumps(describe(config), sort_keys=True, separators=(",", ":"))
    return fingerprint(canonical)


def _describe_fields(value: Any) -> dict[str, Any]:
    items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: describe(item) for name, item in items.items() if item is not None}


def _build(annotation: type, data: Any, path: str) -> Any:
    """The method or dataclass that `data` describes. Other data stay as they are.

    A `Surfaced` dataclass has one key for each surface, and collects what stands there in one field.
    """
    registry = REGISTRY_OF.get(annotation)
    if isinstance(data, annotation):
        return data
    if registry is not None:
        return _build_method(registry, data, path)
    return _build_table(annotation, data, path) if dataclasses.is_dataclass(annotation) else data


def _build_method(registry: Registry[Any], data: Any, path: str) -> Any:
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise mismatch(path, f"the name of {with_article(registry.kind)}, or a table with its `name` and options", data)
    options = {key: value for key, value in data.items() if key != "name"}
    return registry.construct(data["name"], options, path)


def _build_table(kind: Any, data: Any, path: str) -> Any:
    if isinstance(data, str) and {"name", "options"} <= {field.name for field in dataclasses.fields(kind)}:
        data = {"name": data}  # `model = "lenet5"` is short for a table with that name
    if not isinstance(data, dict):
        raise mismatch(path, "a table", data)
    annotations = field_types(kind)
    by_surface: dict[str, Any] = kind.method_types() if hasattr(kind, "method_types") else {}
    fields = {field.name: annotations[field.name] for field in dataclasses.fields(kind)}
    if by_surface:
        fields = {key: annotation for key, annotation in fields.items() if key not in ("method", "methods")} | by_surface
    known = {key: value for key, value in data.items() if key in fields and key != "options"}
    extra = {key: value for key, value in data.items() if key not in known}
    if extra and "options" not in fields:
        name = next(iter(extra))
        refuse_renamed(_join(path, name), name, path)
        raise OptionError(_join(path, name), f"no such key; {suggestion(name, fields, 'keys are')}")
    arguments = {key: check_value(fields[key], value, _join(path, key), _build) for key, value in known.items()}
    if "options" in fields:
        given = check_value(dict[str, Any], extra.pop("options", {}), _join(path, "options"))
        arguments["options"] = given | extra
    for field in dataclasses.fields(kind):
        if field.name in fields and field.name not in arguments and _is_required(field):
            raise OptionError(_join(path, field.name), f"expected {type_name(annotations[field.name])}, got nothing")
    if by_surface:
        arguments |= kind.collect_methods({key: arguments.pop(key) for key in by_surface if key in arguments})
    try:
        return kind(**arguments)
    except OptionError as error:
        raise error.under(path) from None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) < 10


def _item(table: Any, key: str) -> Any:
    if isinstance(table, list):
        return table[int(key)] if _is_index(key) and int(key) < len(table) else None
    return table.get(key)


def _put(table: Any, key: str, value: Any, path: str) -> Any:
    if isinstance(table, list):
        if not _is_index(key) or int(key) >= len(table):
            raise ValueError(f"{path.strip()}: expected an index below {len(table)}, got {key!r}")
        table[int(key)] = value
    else:
        table[key] = value
    return value


def _parse_value(text: str) -> Any:
    try:
        return _parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _parse_toml(text: str) -> dict[str, Any]:
    _refuse_long_keys(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("not a TOML file: its tables or lists are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # a number of more digits than Python reads
        raise ValueError("not a TOML file: a number has more than 4,300 digits") from None


def _refuse_long_keys(text: str) -> None:
    """Refuse keys of more parts than tables may lie within one another: the parser's time and memory grow with their square."""
    dots = 0
    for token in _TOKEN.finditer(text):
        dots = dots + 1 if token.lastgroup == "dot" else dots if token.lastgroup == "part" else 0
        if dots >= DEEPEST_TABLE:
            raise ValueError(f"not a TOML file: a key has more than {DEEPEST_TABLE} parts")


def _refuse_odd_values(value: Any, path: str, depth: int = 0) -> None:
    """Refuse what TOML has and no option takes: dates, times, and tables within tables without end."""
    if depth > DEEPEST_TABLE:
        raise OptionError(path[:LONGEST_PATH], f"tables or lists are nested more than {DEEPEST_TABLE} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_odd_values(item, _join(path, key), depth + 1)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _refuse_odd_values(item, f"{path}[{position}]", depth + 1)
    elif not isinstance(value, (str, int, float)):
        raise mismatch(path, "text, a number, a list or a table", value)
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OptionError(path, f"expected a number of at most {MOST_BITS} bits, got one of {value.bit_length()}")
