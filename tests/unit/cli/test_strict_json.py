"""JSON that every strict parser reads."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.cli.strict_json import json_line, json_text

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def refuse(word: str) -> None:
    """What a strict parser does with NaN and Infinity."""
    raise ValueError(word)


@given(VALUES)
def test_whatever_a_journal_holds_becomes_strict_json_in_one_line_of_ascii(value: Any) -> None:
    line = json_line(value)
    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line, parse_constant=refuse) == json.loads(json_text(value), parse_constant=refuse)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text())
def test_what_json_can_hold_comes_back_as_it_was(value: float | str) -> None:
    assert json.loads(json_line([value])) == [value]


def test_numbers_that_are_not_finite_become_words_and_bytes_base64() -> None:
    value = {
        "a": [math.nan, math.inf, -math.inf],
        "b": MappingProxyType({"c": b"\x00\xff"}),
        "d": (1, True, None),
    }
    assert json_line(value) == '{"a":["NaN","Infinity","-Infinity"],"b":{"c":"AP8="},"d":[1,true,null]}'


def test_what_no_journal_holds_is_refused() -> None:
    with pytest.raises(TypeError, match="object is no value of a journal"):
        json_line([object()])
