"""The types of options, with constraints that are checked whenever a method is built."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal

LONGEST_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True)
class Constraint:
    """A condition on a value and the words for it in an error message."""

    expected: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Constraint("a positive int", lambda value: value > 0)]
NonNegativeInt = Annotated[int, Constraint("an int of at least 0", lambda value: value >= 0)]
PositiveFloat = Annotated[float, Constraint("a positive number", lambda value: value > 0 and not math.isnan(value))]
NonNegativeFloat = Annotated[float, Constraint("a number of at least 0", lambda value: value >= 0)]
FiniteFloat = Annotated[float, Constraint("a finite number of at least 0", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Constraint("a number in [0, 1]", lambda value: 0 <= value <= 1)]


class OptionError(ValueError):
    """`path: expected ..., got ...`. Callers that know the start of the path prepend it by `under`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path, self.problem = path, problem

    def under(self, prefix: str) -> OptionError:
        separator = "." if self.path and not self.path.startswith("[") else ""
        return OptionError(f"{prefix}{separator}{self.path}", self.problem)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


Builder = Callable[[Any, Any, str], Any]  # annotation, value, path -> what a table or a name describes, or the value as it is


def check_value(annotation: Any, value: Any, path: str, build: Builder | None = None) -> Any:
    """`value` if it fits `annotation`, else an OptionError. An int becomes a float, and a list a tuple, where one is expected.

    `build` turns names and tables, at any depth, into the objects that they describe.
    """
    if annotation is Any:
        return value
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        base, *constraints = members
        value = check_value(base, value, path, build)
        for constraint in constraints:
            if isinstance(constraint, Constraint) and not constraint.holds(value):
                raise mismatch(path, constraint.expected, value)
        return value
    if origin in (typing.Union, types.UnionType):
        return _check_union(members, value, path, build)
    if origin is Literal:
        if not isinstance(value, (str, int, float, type(None))) or value not in members:
            raise mismatch(path, "one of " + ", ".join(repr(choice) for choice in members), value)
        return value
    if origin is tuple:
        return _check_tuple(members, value, path, build)
    if origin is list:
        return list(_check_tuple((members[0], Ellipsis), value, path, build))
    if origin is dict:
        if not isinstance(value, dict):
            raise mismatch(path, "a table", value)
        key_type, value_type = members
        return {check_value(key_type, k, path): check_value(value_type, v, f"{path}.{k}", build) for k, v in value.items()}
    if isinstance(annotation, type):
        return _check_class(annotation, value if build is None else build(annotation, value, path), path)
    return value


def _check_class(kind: type, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise mismatch(path, "a number below 1.8e308", value) from None
    if kind is float and isinstance(value, str) and value in ("inf", "-inf"):  # as JSON, which has no infinity, carries it
        return float(value)
    if issubclass(kind, Enum) and not isinstance(value, kind):
        return check_value(Literal[tuple(member.value for member in kind)], value, path) and kind(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, float)):
        raise mismatch(path, _words_for(kind), value)
    return value


def _check_union(members: tuple[Any, ...], value: Any, path: str, build: Builder | None) -> Any:
    """The value as the first member that fits. Else the error of the member that a table can describe, or of the union."""
    if value is None and type(None) in members:
        return None
    errors: list[tuple[Any, OptionError]] = []
    for member in members:
        if member is not type(None):
            try:
                return check_value(member, value, path, build)
            except OptionError as error:
                errors.append((member, error))
    structured = [error for member, error in errors if build is not None and _is_structured(member)]
    if structured:
        raise structured[0]
    if len(errors) == 1:
        raise errors[0][1]
    raise mismatch(path, " or ".join(type_name(member) for member in members), value)


def _check_tuple(members: tuple[Any, ...], value: Any, path: str, build: Builder | None) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise mismatch(path, "a list", value)
    if len(members) == 2 and members[1] is Ellipsis:
        return tuple(check_value(members[0], item, f"{path}[{i}]", build) for i, item in enumerate(value))
    if len(value) != len(members):
        raise mismatch(path, f"a list of {len(members)}", value)
    return tuple(check_value(member, item, f"{path}[{i}]", build) for i, (member, item) in enumerate(zip(members, value)))


def _is_structured(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation) or typing.get_origin(annotation) is tuple


def check_fields(instance: Any) -> None:
    """Check every field of a frozen dataclass against its annotation, converting where `check_value` does."""
    annotations = field_types(type(instance))
    for field in dataclasses.fields(instance):
        value = check_value(annotations[field.name], getattr(instance, field.name), field.name)
        object.__setattr__(instance, field.name, value)


@cache
def field_types(kind: type) -> dict[str, Any]:
    """The annotation of every field of a dataclass, constraints included."""
    return typing.get_type_hints(kind, include_extras=True)


def mismatch(path: str, expected: str, value: Any) -> OptionError:
    return OptionError(path, f"expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """The value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or a list of lists of lists
        return f"{type(value).__name__} that is too long to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def type_name(annotation: Any) -> str:
    """The annotation in the words of a help text."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        base, *constraints = typing.get_args(annotation)
        return next((c.expected for c in constraints if isinstance(c, Constraint)), type_name(base))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(member) for member in typing.get_args(annotation))
    if origin is Literal:
        return " | ".join(repr(choice) for choice in typing.get_args(annotation))
    if origin is tuple:
        members = [member for member in typing.get_args(annotation) if member is not Ellipsis]
        return "a list of (" + ", ".join(type_name(member) for member in members) + ")"
    if origin is dict:
        key_type, value_type = typing.get_args(annotation)
        return f"a table of {type_name(key_type)} = {type_name(value_type)}"
    if annotation is type(None):
        return "none"
    return _words_for(annotation) if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _words_for(kind: type) -> str:
    return {int: "an int", float: "a number", str: "text", bool: "true or false"}.get(kind, kind.__name__)
