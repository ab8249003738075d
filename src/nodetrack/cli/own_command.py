"""How the reader of a line types this very program: a command that works as printed, where they are."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

_NAME: Final = "nodetrack"


def own_command() -> str:
    """What to type for this installation's `nodetrack`, quoted for the shell.

    The bare name where the shell would find this installation by it, else the program's path, else, where
    there is no program beside this Python, `python -m nodetrack`.
    """
    program = _program()
    if program is None:
        return f"{shlex.quote(_to_type(Path(sys.executable)))} -m {_NAME}"
    found = shutil.which(_NAME)
    if found is not None and Path(found).samefile(program):
        return _NAME
    return shlex.quote(_to_type(program))


def from_here(path: Path) -> Path:
    """The path as it is written in the working directory: relative for what lies in it, else absolute."""
    here, absolute = Path.cwd(), path.absolute()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else absolute


def _program() -> Path | None:
    """The program that is running, or the one that was installed with this Python."""
    installed = Path(sysconfig.get_path("scripts")) / _NAME
    candidates = [path for path in (Path(sys.argv[0]), installed) if path.name == _NAME]
    return next((path for path in candidates if os.access(path, os.X_OK) and path.is_file()), None)


def _to_type(program: Path) -> str:
    """A path that a shell takes for one: with a slash in it, or it would search for the name."""
    path = str(from_here(program))
    return path if os.sep in path else f".{os.sep}{path}"
