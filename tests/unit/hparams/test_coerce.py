"""Values take the type of their default, or say why they cannot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.hparams.coerce import CannotCoerceError, coerce, is_worth_a_notice
from nodetrack.hparams.fields import ValueType
from nodetrack.hparams.layers import Json


@pytest.mark.case("C068")
@pytest.mark.parametrize(
    ("value", "wanted", "expected", "notice"),
    [
        ("1e-5", float, 1e-5, True),
        (" 3 ", float, 3.0, True),
        (".5", float, 0.5, True),
        (1, float, 1.0, False),
        (16, int, 16, False),
        (16.0, int, 16, True),
        ("16", int, 16, True),
        ("-1.6e1", int, -16, True),
        ("false", bool, False, True),
        ("True", bool, True, True),
        (True, bool, True, False),
        (150, str, "150", True),
        ("1e-5", str, "1e-5", False),
        (["1", 2], list[float], [1.0, 2.0], True),
        ([1, 2.0], list[float], [1.0, 2.0], False),
        ([], list[int], [], False),
        (None, int, None, False),
    ],
)
def test_what_spells_a_value_of_the_type_becomes_one(
    value: Json, wanted: ValueType, expected: Json, notice: bool
) -> None:
    typed = coerce(value, wanted)
    assert typed == expected
    assert type(typed) is type(expected)
    assert is_worth_a_notice(value, typed) is notice


@pytest.mark.case("C068")
@pytest.mark.parametrize(
    ("value", "wanted", "message"),
    [
        (16.5, int, "must be a whole number, not 16.5"),
        ("16.5", int, 'must be a whole number, not "16.5"'),
        ("1_000", int, "must be a whole number"),
        ("١٢", int, "must be a whole number"),
        (True, int, "must be a whole number, not true"),
        ("", int, "must be a whole number"),
        (1e999, int, "must be a whole number"),
        ("9" * 5000, int, "must be a whole number"),
        (False, float, "must be a finite number, not false"),
        ("nan", float, "must be a finite number"),
        ("1e999", float, "must be a finite number"),
        (10**400, float, "must be a finite number"),
        ("fast", float, 'must be a finite number, not "fast"'),
        ([1], float, "must be a finite number, not [1]"),
        ({"a": 1}, float, 'must be a finite number, not {"a": 1}'),
        (1, bool, "must be true or false, not 1"),
        (0.0, bool, "must be true or false"),
        ("yes", bool, "must be true or false"),
        (1.5, str, "must be a text, not 1.5"),
        (True, str, "must be a text, not true"),
        (0.9, list[float], "must be a list, not 0.9"),
        ([0.9, "x"], list[float], 'must be a finite number, not "x" (item 1)'),
    ],
)
def test_anything_else_is_refused_with_the_value(value: Json, wanted: ValueType, message: str) -> None:
    with pytest.raises(CannotCoerceError) as caught:
        coerce(value, wanted)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 120


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_written_as_text_is_the_same_float(number: float) -> None:
    assert coerce(repr(number), float) == number


@given(st.integers())
def test_an_integer_written_as_text_is_the_same_integer(number: int) -> None:
    assert coerce(str(number), int) == number


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()))
@pytest.mark.parametrize("wanted", [bool, int, float, str])
def test_a_value_has_the_wanted_type_or_is_refused(wanted: type, value: Json) -> None:
    try:
        typed = coerce(value, wanted)
    except CannotCoerceError:
        return
    assert typed is None or type(typed) is wanted
    assert not isinstance(typed, float) or math.isfinite(typed)
