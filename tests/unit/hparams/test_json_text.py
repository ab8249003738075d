"""JSON text: places of keys, repeated keys, and what is said about faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.hparams.json_text import MAXIMUM_DEPTH, JsonTextError, parse_json
from nodetrack.hparams.layers import Mark

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def key_paths(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not isinstance(value, dict):
        return set()
    return {(*path, name) for name in value}.union(
        *(key_paths(inner, (*path, name)) for name, inner in value.items())
    )


@given(values, st.sampled_from([None, 0, 1, "\t"]), st.booleans())
def test_every_json_value_is_read_as_the_standard_library_reads_it_and_every_key_is_marked(
    value: Any, indent: int | str | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    document = parse_json(text)
    assert document.value == json.loads(text)
    assert set(document.marks) == key_paths(value)
    assert document.duplicates == ()


@given(st.dictionaries(st.text(), values, max_size=4))
def test_a_mark_is_where_the_key_stands(value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1)
    lines = text.split("\n")
    for path, mark in parse_json(text).marks.items():
        assert lines[mark.line - 1][mark.column - 1 :].startswith(json.dumps(path[-1]))


def test_marks_count_lines_and_columns_from_one() -> None:
    document = parse_json('{"a": 1,\r\n  "b": {"c": [{"d": 2}]}}')
    assert document.marks == {("a",): Mark(1, 2), ("b",): Mark(2, 3), ("b", "c"): Mark(2, 9)}


@pytest.mark.case("C069")
def test_repeated_keys_are_found_with_both_places_and_the_last_value_counts() -> None:
    document = parse_json('{"lr": 1,\n "o": {"b": 1, "b": 2, "b": 3},\n "lr": 2}')
    assert document.value == {"lr": 2, "o": {"b": 3}}
    assert [(found.path, found.first, found.again) for found in document.duplicates] == [
        (("o", "b"), Mark(2, 8), Mark(2, 16)),
        (("o", "b"), Mark(2, 8), Mark(2, 24)),
        (("lr",), Mark(1, 2), Mark(3, 2)),
    ]


@pytest.mark.case("C069")
def test_a_key_repeated_in_other_spelling_is_still_repeated() -> None:
    assert len(parse_json('{"lr": 1, "\\u006cr": 2}').duplicates) == 1


def test_equal_keys_in_different_objects_are_no_repetition() -> None:
    assert parse_json('{"a": {"x": 1}, "b": {"x": 1}, "x": [{"x": 1}, {"x": 2}]}').duplicates == ()


FAULTS = [
    ('{"a": 1,}', 8, "comma stands before the closing bracket"),
    ('{"a": [1, 2, ]}', 12, "comma stands before the closing bracket"),
    ('{"a": 1} // why', 10, "no comments"),
    ('{"a": 1, # why', 10, "no comments"),
    ('{/* why */ "a": 1}', 2, "no comments"),
    ("{'a': 1}", 2, "double quotes"),
    ("{a: 1}", 2, "a key is expected here, in double quotes"),
    ('{"a": True}', 7, "True is not JSON; write true, false or null"),
    ('{"a": None}', 7, "None is not JSON"),
    ('{"a": NaN}', 7, "JSON has no NaN"),
    ('{"a": [-Infinity]}', 8, "JSON has no -Infinity"),
    ('{"a": nan}', 7, "JSON has no nan"),
    ('{"a": +inf}', 7, "JSON has no +inf"),
    ('{"a": .5}', 7, "a number starts with a digit"),
    ('{"a": 1e999}', 7, "1e999 is too large"),
    ('{"a": 1 "b": 2}', 9, "comma is missing"),
    ('{"a" 1}', 6, "colon is missing"),
    ('{"a": }', 7, "a value is expected here"),
    ('{"a": 1', 8, "ends too early"),
    ('{"a": "b', 7, "not closed"),
    ('{"a": "b\n"}', 9, "not closed on its line"),
    ('{"a": 1} {"b": 2}', 10, "the value ended before this"),
    ("<<<<<<< HEAD\n{}", 1, "merge conflict"),
    ("", 1, "ends too early"),
]


@pytest.mark.case("C070")
@pytest.mark.parametrize(("text", "column", "hint"), FAULTS)
def test_a_fault_is_named_with_its_place_and_what_to_do(text: str, column: int, hint: str) -> None:
    with pytest.raises(JsonTextError, match=r"^line 1, column \d+: ") as caught:
        parse_json(text)
    assert hint in caught.value.hint
    assert caught.value.mark == Mark(1, column)
    assert caught.value.line_text == text.split("\n")[0]


@pytest.mark.parametrize("word", ["NaN", "// no", "True", ",}", "Infinity"])
def test_words_of_faults_inside_a_text_are_no_faults(word: str) -> None:
    assert parse_json(json.dumps({word: word})).value == {word: word}


def test_a_number_with_too_many_digits_is_a_fault_and_not_a_crash() -> None:
    with pytest.raises(JsonTextError, match="a number cannot be read"):
        parse_json("9" * 5000)


def test_a_long_whole_number_is_kept_exactly() -> None:
    assert parse_json("9" * 400).value == int("9" * 400)


@pytest.mark.parametrize("depth", [MAXIMUM_DEPTH + 1, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_values_nested_too_deep_are_a_fault_and_not_a_crash(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(JsonTextError, match=f"nested more than {MAXIMUM_DEPTH} deep"):
        parse_json(opening * depth + "1" + closing * depth)


def test_the_deepest_permitted_value_is_read() -> None:
    parse_json("[" * MAXIMUM_DEPTH + "1" + "]" * MAXIMUM_DEPTH)
