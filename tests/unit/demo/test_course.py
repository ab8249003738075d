"""When the demo kills and switches, and how it shows and sums up what happens."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nodetrack.demo.display import LiveDisplay, NodeView, PlainDisplay
from nodetrack.demo.orchestrate import Course
from nodetrack.errors import DemoError

NODE = NodeView("miner-0", "0.1.0", 2, "running", 3, 130, "train/loss", 2.5)


@pytest.mark.parametrize("windows", range(4, 40))
def test_the_kill_comes_after_the_first_window_and_before_the_switch(windows: int) -> None:
    course = Course(windows)
    assert 1 <= course.kill_window < course.switch_window < windows


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(DemoError, match="at least 4"):
        Course(3)


def test_off_a_terminal_only_events_are_printed_each_in_one_line() -> None:
    output = io.StringIO()
    with PlainDisplay(Console(file=output, width=20)) as display:
        display.tell("a message that is longer than the console is wide", style="red")
        display.show([NODE], 3, 12)
    assert output.getvalue() == "a message that is longer than the console is wide\n"


def test_on_a_terminal_nodes_and_windows_are_shown_as_well() -> None:
    output = io.StringIO()
    with LiveDisplay(Console(file=output, width=120, force_terminal=True)) as display:
        display.tell("something happened")
        display.show([NODE], 3, 12)
    shown = output.getvalue()
    for words in ("something happened", "miner-0", "running", "train/loss 2.500", "3/12"):
        assert words in shown


def test_on_a_terminal_an_event_is_broken_between_words() -> None:
    output = io.StringIO()
    with LiveDisplay(Console(file=output, width=20, force_terminal=True, color_system=None)) as display:
        display.tell("it goes back to its last checkpoint")
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    assert lines[0].endswith("it goes back to its")
    assert lines[1] == "last checkpoint"
