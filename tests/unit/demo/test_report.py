"""The report of a kill, from what the killed process printed and from what is in the journals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nodetrack
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.orchestrate import Killed
from nodetrack.demo.report import KillLine, kill_line, printed_steps
from nodetrack.journal.folder import TrackingFolder


def start(folder: DemoFolder) -> nodetrack.Run:
    return nodetrack.init(project="demo", role="miner", uid=1, version="0.1.0", dir=folder.journals)


def log(run: nodetrack.Run, *steps: int) -> None:
    for step in steps:
        run.log({"train/loss": 1.0}, step=step)


def reported(tmp_path: Path, printed: str, next_attempt: Callable[[nodetrack.Run], None] | None) -> KillLine:
    """The report of a miner that logged steps 0, 1, 2, with a checkpoint after 0, and came back."""
    folder = DemoFolder(tmp_path)
    run = start(folder)
    log(run, 0)
    checkpoint = run.state_dict()
    log(run, 1, 2)
    run.finish()
    if next_attempt is not None:
        run = start(folder)
        run.load_state_dict(checkpoint)
        next_attempt(run)
        run.finish()
    output = folder.output("miner-1", 1)
    output.parent.mkdir()
    output.write_text(printed)
    return kill_line(
        Killed("miner-1", 1, 0), folder, [TrackingFolder(folder.journals).find("miner-1", "demo")]
    )


PRINTED = "step 0 window 0 loss 5.1\nstep 1 window 0 loss 5.0\nstep 2 window 0 loss 5.0\n"


def test_only_whole_lines_count_as_printed_steps(tmp_path: Path) -> None:
    output = tmp_path / "miner-0-start-1.log"
    output.write_text("run abc step 0\nstep 0 window 0 loss 5.1\nstep 1 window 0 loss 5.0\nstep 2")
    assert printed_steps(output) == {0, 1}


def test_a_miner_that_came_back_is_told_by_its_checkpoint_and_by_its_first_step(tmp_path: Path) -> None:
    """The window of the checkpoint may have been closed while it was away: both steps are given."""
    line = reported(tmp_path, PRINTED, lambda run: log(run, 40, 41))
    assert (line.last_step, line.back_at_step, line.resumed_at_step) == (2, 1, 40)
    assert (line.printed_steps, line.missing_steps) == (3, ())


def test_a_step_that_was_printed_and_is_not_in_the_journal_is_found(tmp_path: Path) -> None:
    """What the next attempt logs at that step does not make up for it."""
    line = reported(tmp_path, f"{PRINTED}step 3 window 0 loss 4.9\n", lambda run: log(run, 1, 2, 3))
    assert (line.printed_steps, line.missing_steps) == (4, (3,))


def test_a_miner_that_came_back_too_late_to_train_went_on_nowhere(tmp_path: Path) -> None:
    assert reported(tmp_path, PRINTED, lambda run: None).resumed_at_step is None


def test_without_a_next_attempt_there_is_no_step_it_came_back_at(tmp_path: Path) -> None:
    line = reported(tmp_path, PRINTED, None)
    assert (line.last_step, line.back_at_step, line.resumed_at_step) == (2, None, None)
