"""The command that is printed for the reader is one that works in their shell."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from nodetrack.cli.own_command import from_here, own_command


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the `.venv` of the working directory, not on PATH, by which the command was started."""
    made = write_program(Path(".venv/bin/nodetrack"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [str(made)])
    return made


def write_program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho hello\n")
    path.chmod(0o755)
    return path


def shell(command: str) -> str:
    return subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True, text=True).stdout


@pytest.mark.usefixtures("program")
def test_off_the_path_it_is_the_program_as_seen_from_here() -> None:
    assert own_command() == ".venv/bin/nodetrack"


def test_on_the_path_it_is_the_bare_name(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent.absolute()))
    assert own_command() == "nodetrack"


def test_a_link_to_it_on_the_path_counts(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("links").mkdir()
    Path("links/nodetrack").symlink_to(program.absolute())
    monkeypatch.setenv("PATH", "links")
    assert own_command() == "nodetrack"


@pytest.mark.usefixtures("program")
def test_another_installation_on_the_path_is_not_taken_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_program(Path("other/nodetrack"))
    monkeypatch.setenv("PATH", str(other.parent.absolute()))
    assert own_command() == ".venv/bin/nodetrack"


def test_from_elsewhere_it_is_the_whole_path(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program.absolute())])
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert Path(own_command()).is_absolute()
    assert shell(own_command()) == "hello\n"


def test_a_path_with_blanks_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    program = write_program(Path("my tools/$HOME/nodetrack"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert shell(own_command()) == "hello\n"


def test_a_program_right_here_is_not_searched_for(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    monkeypatch.setattr(sys, "argv", ["./nodetrack"])
    assert own_command() == "./nodetrack"


@pytest.mark.parametrize("started_as", ["-c", "tools/another"])
def test_started_otherwise_it_is_the_program_of_this_python(
    started_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(Path("tools/another"))
    scripts = write_program(Path("scripts/nodetrack")).parent
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [started_as])
    assert own_command() == "scripts/nodetrack"


def test_without_a_program_it_is_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "nowhere")
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert own_command() == f"{shlex.quote(sys.executable)} -m nodetrack"
    assert shell(f"{own_command()} --version").strip()


def test_a_path_outside_the_working_directory_stays_absolute() -> None:
    assert from_here(Path.cwd() / "a" / "b") == Path("a/b")
    assert from_here(Path("/usr/lib")) == Path("/usr/lib")
