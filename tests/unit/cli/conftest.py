"""Nodes that really log into the working folder, and the program that reads what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import nodetrack
from nodetrack.cli.main import app
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.segment import segment_paths

_NODE = """
import math, os, signal, sys
import nodetrack
run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", config={"lr": 0.1})
"""


class Lab:
    """Where a test makes runs and looks at them. The node is miner 1 of project p unless told otherwise."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, **arguments: Any) -> nodetrack.Run:
        """Start an attempt in this process."""
        return nodetrack.init(**{"project": "p", "role": "miner", "uid": 1, "version": "0.1.0", **arguments})

    def log_steps(self, run: nodetrack.Run, steps: Iterable[int], plus: float = 0) -> None:
        """Log a = step + plus."""
        for step in steps:
            run.log({"a": float(step + plus)}, step=step)

    def node(self, body: str) -> subprocess.CompletedProcess[str]:
        """Let a process of its own run the body, with its attempt as `run`, and wait for its end."""
        return subprocess.run(
            [sys.executable, "-c", _NODE + body], check=False, capture_output=True, text=True
        )

    def killed_node(self, body: str) -> None:
        """As `node`, ended by SIGKILL."""
        done = self.node(f"{body}\nos.kill(os.getpid(), signal.SIGKILL)")
        assert done.returncode == -9, done.stderr

    def open(self, *command: str) -> subprocess.Popen[str]:
        """A process that the test talks to and that is gone behind it."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.processes.append(process)
        return process

    def open_node(self, body: str) -> subprocess.Popen[str]:
        """As `node`, without waiting."""
        return self.open(sys.executable, "-u", "-c", _NODE + body)

    def open_program(self, *arguments: str) -> subprocess.Popen[str]:
        """The program as a process of its own."""
        return self.open(sys.executable, "-m", "nodetrack", *arguments)

    def run(self, *arguments: object) -> Result:
        """The program in this process."""
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def out(self, *arguments: object) -> str:
        """What the program prints; it must end with 0."""
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: object) -> Any:
        """What the program prints, as one strict JSON value."""
        return strict_loads(self.out(*arguments))

    def lines(self, *arguments: object) -> list[Any]:
        """What the program prints, each line as strict JSON."""
        return [strict_loads(line) for line in self.out(*arguments).splitlines()]

    def segments(self, run: nodetrack.Run | RunFolder) -> list[Path]:
        """All segments of a run, relative to the working folder."""
        paths = [
            path for attempt in RunFolder(run.folder, "p").attempts for path in segment_paths(attempt.folder)
        ]
        return [Path(os.path.relpath(path)) for path in paths]


def strict_loads(text: str) -> Any:
    """As `json.loads`, for what every parser takes: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """See Lab."""
    made = Lab()
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()
