"""How times, numbers and values are written for people."""

from __future__ import annotations

import math
import time

import pytest

from nodetrack.cli.terminal import (
    ago,
    clock,
    counted,
    duration,
    event_text,
    moment,
    number,
    printable,
    shortened,
    value_text,
)

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (86399, "23 h ago"),
        (86400, "1 d ago"),
        (400 * 86400, "400 d ago"),
        (-5, "0 s ago"),
    ],
)
def test_a_point_in_time_is_told_in_its_largest_unit(seconds: float, text: str) -> None:
    now = 1_700_000_000 * SECOND
    assert ago(now - int(seconds * SECOND), now) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.24, "4.2 s"),
        (60, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (90000, "1 d 1 h"),
        (-1, "0.0 s"),
    ],
)
def test_a_length_of_time_is_told_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_clock_shows_the_date_only_if_it_is_not_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert clock(1_700_000_000_123_456_789) == "2023-11-14 22:13:20.123"
    assert clock(1_700_000_000_123_456_789, milliseconds=False) == "2023-11-14 22:13:20"
    assert moment(1_700_000_000_123_456_789) == "2023-11-14 22:13:20"
    assert len(clock(time.time_ns())) == len("22:13:20.123")
    assert len(clock(time.time_ns(), milliseconds=False)) == len("22:13:20")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**64 - 1, "18446744073709551615"),
        (1.0, "1"),
        (1 / 3, "0.333333"),
        (1.5e-7, "1.5e-07"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
    ],
)
def test_a_number_is_written_to_six_digits_and_an_integer_in_full(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"type": "histogram", "counts": [1, 2]}, "histogram of 2 bins"),
        ({"type": "image", "format": "png", "data": b"abc"}, "png image of 3 bytes"),
        ({"type": "table", "columns": ["a"], "data": [[1], [2]]}, "table of 2 × 1"),
        ({"type": "text", "text": "a\tb"}, "“a\\tb”"),
        ({"type": "video"}, "video"),
        ({"type": "text"}, "text"),
    ],
)
def test_a_typed_value_is_told_in_a_few_words(value: dict[str, object], text: str) -> None:
    assert value_text(value) == text


def test_a_long_text_is_cut_once_it_is_longer_than_a_table_should_hold() -> None:
    assert shortened("x" * 40) == "“" + "x" * 40 + "”"
    assert shortened("x" * 41) == "“" + "x" * 40 + "…”"
    assert shortened("\n" * 41) == "“" + "\\n" * 40 + "…”"


def test_what_would_change_the_terminal_is_shown_as_its_escape() -> None:
    assert printable("a\x1b[31m\r\n\x9b\ud800é") == "a\\x1b[31m\\r\\n\\x9b\\ud800é"


def test_an_event_is_told_by_its_data() -> None:
    assert (
        event_text("other", {"step": 4, "why": "a\nb", "limits": [1, 2]}) == "step 4, why a\\nb, limits [1,2]"
    )
    assert event_text("rewind", {"step": 79}) == (
        "went back to step 80: earlier rows from there on are superseded"
    )
    assert event_text("signal", {"signal": "SIGTERM"}) == "SIGTERM received"
    assert event_text("rewind", {}) == event_text("signal", {}) == ""
    assert event_text("alert", {"title": "NaN", "text": ""}) == "NaN"


def test_things_are_counted_in_words() -> None:
    assert [counted(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
