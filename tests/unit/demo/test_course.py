"""When the demo kills and switches, and how it shows and sums up what happens."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nodetrack.demo.display import LiveDisplay, NodeView, PlainDisplay
from nodetrack.demo.orchestrate import Course
from nodetrack.demo.report import missing_steps
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


def test_a_step_that_was_printed_and_is_not_in_the_journal_is_found(tmp_path: Path) -> None:
    output = tmp_path / "miner-0-start-1.log"
    output.write_text("run abc step 0\nstep 0 window 0 loss 5.1\nstep 1 window 0 loss 5.0\nstep 2 win")
    assert missing_steps(output, [0, 1, 2]) == (3, ())
    assert missing_steps(output, [0, 2]) == (3, (1,))
