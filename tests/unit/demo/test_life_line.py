"""The life line: closing the other end is seen, whoever closes it."""

from __future__ import annotations

import os
import threading

from nodetrack.demo.life_line import LifeLine


def test_a_held_line_is_whole_and_a_closed_one_is_cut_for_good() -> None:
    reading, writing = os.pipe()
    line = LifeLine(reading)
    assert not line.is_cut()
    os.close(writing)
    assert line.is_cut()
    os.close(reading)
    assert line.is_cut()


def test_what_is_typed_does_not_cut_the_line() -> None:
    reading, writing = os.pipe()
    line = LifeLine(reading)
    os.write(writing, b"hello\n")
    assert not line.is_cut()
    os.close(writing)
    assert line.is_cut()
    os.close(reading)


def test_waiting_ends_when_the_line_is_cut() -> None:
    reading, writing = os.pipe()
    cutter = threading.Timer(0.1, os.close, [writing])
    cutter.start()
    assert LifeLine(reading).wait(60.0)
    cutter.join()
    os.close(reading)


def test_waiting_on_a_whole_line_ends_with_its_time() -> None:
    reading, writing = os.pipe()
    assert not LifeLine(reading).wait(0.05)
    os.close(writing)
    os.close(reading)
