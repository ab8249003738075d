"""The program as a whole: version, help, errors, pipes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nodetrack
from nodetrack.cli.main import COMMANDS

if TYPE_CHECKING:
    from conftest import Lab


def test_version_prints_the_version_and_nothing_else(lab: Lab) -> None:
    assert lab.out("--version") == f"{nodetrack.__version__}\n"


def test_the_help_lists_every_command_and_the_exit_codes(lab: Lab) -> None:
    printed = lab.out("--help")
    for command in COMMANDS:
        assert f"│ {command} " in printed
    assert "Exit codes: 0 done, 1 something was found wrong" in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_of_its_own(lab: Lab, command: str) -> None:
    assert f"Usage: nodetrack {command}" in lab.out(command, "--help")


@pytest.mark.parametrize("command", ["", *COMMANDS, "journal cat", "journal verify", "hparams diff"])
def test_the_help_of_a_flag_names_no_type(lab: Lab, command: str) -> None:
    printed = lab.out(*command.split(), "--help")
    assert re.search(r"--help +Show this message", printed)
    assert "<bool>" not in printed


def test_a_mistyped_command_names_the_nearest_one(lab: Lab) -> None:
    result = lab.run("rnus")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'runs'" in result.stderr


def test_listing_runs_imports_neither_settings_models_nor_parquet_nor_torch() -> None:
    """A command waits for what it needs and for nothing else."""
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom nodetrack.cli.main import app\n"
        "assert CliRunner().invoke(app, ['runs', '--dir', '.']).exit_code == 0\n"
        "heavy = {'nodetrack.settings', 'nodetrack.hparams.defaults', 'pyarrow', 'torch', 'wandb'}\n"
        "print(sorted(heavy & {*sys.modules}))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_python_dash_m_is_the_same_program() -> None:
    printed = subprocess.check_output([sys.executable, "-m", "nodetrack", "--version"], text=True)
    assert printed == f"{nodetrack.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nobody"),
        ("tail", "nobody"),
        ("export", "nobody"),
        ("journal", "cat", "nobody"),
        ("journal", "verify", "nobody"),
        ("runs", "--dir", "nowhere"),
        ("runs", "--state", "dead"),
        ("runs", "--version", "newest"),
        ("runs", "--name", "("),
        ("runs", "--sort", "age"),
        ("runs", "--columns", "name,age"),
        ("tail", "miner-1", "--metric", "["),
        ("export", "miner-1", "--format", "xlsx"),
        ("export", "miner-1", "--output", "nowhere/rows.csv"),
        ("export", "miner-1", "--output", "rows.xlsx"),
        ("journal", "cat", "miner-1", "--kind", "rows"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_told_in_one_sentence_and_ends_with_2(lab: Lab, arguments: tuple[str, ...]) -> None:
    lab.start().finish()
    result = lab.run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("nodetrack: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_a_setting_that_cannot_be_used_is_told_in_one_sentence(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODETRACK_RANK", "first")
    result = lab.run("runs")
    assert result.exit_code == 2
    assert "NODETRACK_RANK" in result.stderr


def test_a_file_that_may_not_be_read_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "secret/runs")

    monkeypatch.setattr(Path, "iterdir", refuse)
    Path("somewhere").mkdir()
    result = lab.run("runs", "--dir", "somewhere")
    assert (result.exit_code, result.stderr) == (2, "nodetrack: secret/runs: Permission denied.\n")


@pytest.mark.parametrize(
    "command",
    ["export miner-1", "journal cat miner-1", "tail miner-1 -n 9999 --json", "tail miner-1 -n 9999"],
)
def test_a_reader_that_has_enough_ends_the_program_quietly(lab: Lab, command: str) -> None:
    """More is printed than a pipe holds, and `head` goes after the first line."""
    with lab.start() as run:
        lab.log_steps(run, range(3000))
    program = f"'{sys.executable}' -m nodetrack {command}"
    done = subprocess.run(
        ["bash", "-c", f"{program} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
