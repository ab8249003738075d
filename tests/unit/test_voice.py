"""What a program that has set up no logging sees, and what one that has does not see twice."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def errors_of(folder: Path, body: str, **environment: str) -> str:
    """What the program wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr


START = "import nodetrack; run = nodetrack.init(project='p', role='miner', uid=7, version='1.0', id='abc')\n"


def test_a_start_says_in_one_line_which_run_it_is_and_where_it_lies(tmp_path: Path) -> None:
    first = errors_of(tmp_path, START + "run.log({'a': 1.0}, step=41)")
    folder = tmp_path / ".nodetrack"
    assert first == (
        f"nodetrack: Run abc (miner-7 of project p, version 1.0) is new; its journal is in {folder}.\n"
    )
    second = errors_of(tmp_path, START)
    assert "goes on at step 42, attempt 0002-" in second
    assert second.count("\n") == 1


def test_quiet_leaves_the_warnings(tmp_path: Path) -> None:
    said = errors_of(tmp_path, START + "run.log({'a': 'text'})", NODETRACK_QUIET="1")
    assert said == "nodetrack: 'a' is left out of its rows: a text is no number: wrap it in nodetrack.Text.\n"


def test_a_program_with_logging_of_its_own_gets_everything_once_through_it(tmp_path: Path) -> None:
    body = "import logging; logging.basicConfig(format='mine: %(message)s', level=logging.WARNING)\n"
    assert errors_of(tmp_path, body + START + "run.log({'a': None})") == (
        "mine: 'a' is left out of its rows: None is no number.\n"
    )


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    assert errors_of(tmp_path, START, RANK="3") == ""


def test_an_unknown_version_is_warned_of(tmp_path: Path) -> None:
    said = errors_of(tmp_path, START.replace("version='1.0', ", ""), NODETRACK_QUIET="1")
    assert "rows carry 0+unknown: pass version= to init" in said


def test_a_callers_mistake_shows_no_error_of_ours_above_it(tmp_path: Path) -> None:
    body = """
        for values in (0.5, {3: 1.0}, "x"):
            try:
                run.log(values)
            except nodetrack.errors.UsageError as error:
                assert error.__context__ is None, error.__context__
        run.finish()
        try:
            run.log({"a": 1.0})
        except nodetrack.errors.UsageError as error:
            assert error.__context__ is None
        try:
            nodetrack.init(mode="onlin")
        except nodetrack.errors.SettingsError as error:
            assert error.__suppress_context__
    """
    errors_of(tmp_path, START + textwrap.dedent(body), NODETRACK_QUIET="1")
