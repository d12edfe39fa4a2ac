"""Values that fit an annotation, what they become, and the sentence where they do not."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dosimeter.options import (
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OptionError,
    PositiveFloat,
    PositiveInt,
    check_fields,
    check_value,
    type_name,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@given(st.floats(0, 1))
def test_what_fits_is_given_back_and_checked_twice_stays(value):
    assert check_value(Fraction, value, "share") == value
    assert check_value(Fraction, check_value(Fraction, value, "share"), "share") == value


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (float, 3, 3.0),
        (float, "-inf", -math.inf),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (int | None, None, None),
        (int | str, "a", "a"),
        (Colour, "red", Colour.RED),
        (Any, object, object),
    ],
)
def test_values_become_what_the_annotation_says(annotation, value, expected):
    found = check_value(annotation, value, "option")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "phrase"),
    [
        (PositiveInt, 0, "option: expected a positive int"),
        (NonNegativeInt, -1, "an int of at least 0"),
        (PositiveFloat, math.nan, "a positive number"),
        (NonNegativeFloat, -0.1, "at least 0"),
        (FiniteFloat, math.inf, "a finite number"),
        (Fraction, 1.1, r"in \[0, 1\]"),
        (int, True, "expected an int, got True"),
        (float, False, "expected a number"),
        (int, 2.0, "expected an int"),
        (Literal["a", "b"], "c", "one of 'a', 'b'"),
        (Colour, "green", "one of 'red', 'blue'"),
        (tuple[int, ...], [1, "b"], r"option\[1\]: expected an int"),
        (tuple[int, int], [1], "a list of 2"),
        (tuple[int, ...], "ab", "a list"),
        (dict[str, int], {"a": "b"}, r"option\.a: expected an int"),
        (int | str, 1.5, "an int or text"),
        (int | None, "a", "expected an int, got 'a'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(annotation, value, phrase):
    with pytest.raises(OptionError, match=phrase):
        check_value(annotation, value, "option")


def test_fields_are_checked_and_converted():
    @dataclass(frozen=True)
    class Options:
        rate: PositiveFloat
        sizes: tuple[int, ...] = ()

        def __post_init__(self):
            check_fields(self)

    Options.__annotations__.update(rate=PositiveFloat, sizes=tuple[int, ...])
    options = Options(2, [3, 4])  # pyright: ignore[reportArgumentType]
    assert (options.rate, type(options.rate), options.sizes) == (2.0, float, (3, 4))
    with pytest.raises(OptionError, match="rate: expected a positive number"):
        Options(0)


def test_an_error_is_put_under_the_path_of_its_caller():
    inner = OptionError("steps", "expected an int")
    assert str(inner.under("attack")) == "attack.steps: expected an int"
    assert str(inner.under("[2]").under("attacks")) == "attacks[2].steps: expected an int"
    assert str(OptionError("", "expected an int").under("attack")) == "attack: expected an int"


def test_types_are_named_as_a_reader_says_them():
    assert type_name(PositiveInt | None) == "a positive int or none"
    assert type_name(tuple[float, ...]) == "a list of (a number)"
    assert type_name(dict[str, bool]) == "a table of text = true or false"
    assert type_name(Literal["a", "b"]) == "'a' | 'b'"
