"""A node that has bad days: its trainer is a real process, and a ledger outside tells what it acknowledged.

    node = Node(tmp_path, [backend.config])
    node.start()
    node.wait_for_rows(50)
    node.finish()
    assert_arrived(node, backend)      # by script: acknowledged rows == rows at the backend

Every process that a node starts is known by a variable in its environment, also when its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nodetrack.journal.folder import RunFolder, TrackingFolder

#: A row is its step and its value; no two rows of a node have the same value.
Row = tuple[int, float]

TRAINER = Path(__file__).with_name("trainer.py")
#: How long anything may take before a test gives up: bounds on hanging, not measures of speed.
PATIENCE_SECONDS = 60.0
#: What a call that has a limit of its own, of 1 to 5 seconds, may take where a proxy hangs for 300.
BOUND_SECONDS = 30.0
_MARK = "NODETRACK_TEST_NODE"
_SYNC = f"""
import json, sys
from nodetrack.cli.main import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(["sync", "--timeout", "{PATIENCE_SECONDS}", *arguments])
    except SystemExit as end:
        if end.code:
            raise
"""


class Destination(Protocol):
    """Where rows end up, as its own reader sees it."""

    @property
    def idempotent(self) -> bool:
        """Whether a row that is sent twice is there once."""
        ...

    @property
    def config(self) -> dict[str, object]:
        """What goes into `init(backends=[...])`."""
        ...

    @property
    def readable_after_seconds(self) -> float:
        """How long what it has acknowledged may take to be readable."""
        ...

    def rows(self, run: str) -> Counter[Row]:
        """The rows of the run that are there, and how often each is."""
        ...


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until it holds; fails after `seconds`, saying what did not come."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what}: not within {seconds} s"
        time.sleep(0.02)


class Node:
    """One node: its folder, its trainer of the moment, and all that its trainers have acknowledged."""

    def __init__(self, folder: Path, backends: Sequence[Mapping[str, object]], **settings: object) -> None:
        self.folder = folder / "node"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tracking = self.folder / ".nodetrack"
        self.pause = 0.003
        self.restart_pauses = [0.05] * 20
        self.settings: dict[str, object] = {
            "dir": str(self.tracking),
            "project": "bad-days",
            "role": "miner",
            "uid": "7",
            "version": "1.0",
            "backends": [{"batch_seconds": 0.05, **backend} for backend in backends],
            "heartbeat_seconds": 1.0,
            "system_seconds": 0,
            **settings,
        }
        self.run_id = ""
        self.environment = {**os.environ, _MARK: secrets.token_hex(8)}
        self._ledger = self.folder / "ledger.txt"
        self._errors = self.folder / "trainer-errors.txt"
        self._trainer: subprocess.Popen[str] | None = None

    # -- the trainer ---------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Start the trainer; returns what it says once `init` has returned: `run`, `attempt`, `seconds`."""
        self._begin()
        said = self._hear("begun")
        assert self.run_id in ("", said["run"]), "every attempt is one of the same run"
        self.run_id = said["run"]
        return said

    def start_in_vain(self) -> str:
        """Start a trainer whose `init` raises; returns what it printed."""
        trainer = self._begin()
        said, _ = trainer.communicate(timeout=PATIENCE_SECONDS)
        assert trainer.returncode == 1, said + self.errors()
        assert said == ""
        return self.errors()

    def _begin(self) -> subprocess.Popen[str]:
        order = {
            "settings": self.settings,
            "ledger": str(self._ledger),
            "first": len(self.tried()) + 1,
            "pause": self.pause,
            "restart_pauses": self.restart_pauses,
        }
        with self._errors.open("ab") as errors:
            self._trainer = subprocess.Popen(
                [sys.executable, str(TRAINER), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self.folder,
                env=self.environment,
            )
        return self._trainer

    def wait_for_rows(self, count: int) -> None:
        """Wait until `count` more rows are acknowledged."""
        wanted = len(self.acknowledged()) + count
        until(lambda: len(self.acknowledged()) >= wanted, f"{count} more rows ({self.errors()})")

    def stop_logging(self) -> None:
        """From now on no row is logged; the run stays open."""
        self._say("stop")
        self._hear("stopped")

    def health(self) -> dict[str, Any]:
        """What `run.health()` says in the trainer."""
        self._say("health")
        health: dict[str, Any] = self._hear("health")["health"]
        return health

    def finish(self) -> float:
        """Finish the run and end the trainer; returns how long `finish` took, in seconds."""
        trainer = self._running()
        self.begin_to_finish()
        seconds: float = self._hear("finished")["seconds"]
        assert trainer.wait(PATIENCE_SECONDS) == 0, self.errors()
        self._let_go()
        return seconds

    def begin_to_finish(self) -> None:
        """Have the trainer finish the run, and do not wait for it."""
        self._say("finish")

    def kill(self) -> None:
        """SIGKILL the trainer."""
        trainer = self._running()
        trainer.kill()
        trainer.wait(PATIENCE_SECONDS)
        self._let_go()

    def _running(self) -> subprocess.Popen[str]:
        assert self._trainer is not None
        return self._trainer

    def _say(self, word: str) -> None:
        pipe = self._running().stdin
        assert pipe is not None
        pipe.write(f"{word}\n")
        pipe.flush()

    def _hear(self, event: str) -> dict[str, Any]:
        pipe = self._running().stdout
        assert pipe is not None
        line = pipe.readline()
        assert line, f"the trainer ended before it said {event!r}: {self.errors()}"
        said: dict[str, Any] = json.loads(line)
        assert said["event"] == event, said
        return said

    def _let_go(self) -> None:
        for pipe in (self._running().stdin, self._running().stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._trainer = None

    # -- its processes -------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Every living process of the node, with its command line."""
        mark = f"{_MARK}={self.environment[_MARK]}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(folder.name)] = command
        return found

    def delivery_processes(self) -> list[int]:
        """The living delivery processes: at most one, unless something is wrong."""
        return [pid for pid, command in self.processes().items() if "delivery/__main__.py" in command]

    def kill_delivery(self) -> bool:
        """SIGKILL the delivery process and see it end; False if there is none just now."""
        found = set(self.delivery_processes())
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not found & set(self.delivery_processes()), "the end of a killed process")
        return bool(found)

    def wait_until_alone(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until no process of the node is left."""
        until(lambda: not self.processes(), f"the end of {self.processes()}", seconds)

    def close(self) -> None:
        """End what the test has left."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait()
            self._let_go()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- what it did ---------------------------------------------------------------------------------

    def acknowledged(self) -> set[Row]:
        """The rows whose `log` call has returned."""
        return self._in_ledger("done")

    def tried(self) -> set[Row]:
        """The rows that were given to `log`. One that was killed in the middle may have kept the row."""
        return self._in_ledger("try")

    def _in_ledger(self, word: str) -> set[Row]:
        if not self._ledger.exists():
            return set()
        lines = self._ledger.read_text().split("\n")[:-1]
        found = [line.split() for line in lines]
        return {(int(step), float(value)) for what, step, value in found if what == word}

    def errors(self) -> str:
        """What the trainers printed."""
        return self._errors.read_text() if self._errors.exists() else ""

    @property
    def run(self) -> RunFolder:
        """The node's only run, in its journal."""
        [run] = TrackingFolder(self.tracking).runs()
        return run

    # -- by hand -------------------------------------------------------------------------------------

    def sync(self, *calls: Sequence[str], cwd: Path | None = None, **environment: str) -> None:
        """`nodetrack sync` in the node's folder, once for each list of arguments, and all must be delivered.

        One process makes all calls: most of the time of one goes into importing the SDKs.
        """
        done = subprocess.run(
            [sys.executable, "-c", _SYNC, json.dumps(calls or [[]])],
            cwd=cwd or self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def assert_arrived(node: Node, *destinations: Destination, kills: int = 0) -> None:
    """The rows at each destination are the acknowledged ones, and nothing is there that was never logged.

    A trainer that was killed inside `log` may have kept that row without having acknowledged it: at most one
    for each of its `kills`.
    """
    acknowledged, tried = node.acknowledged(), node.tried()
    assert acknowledged, "the node has logged nothing"
    assert len(tried - acknowledged) <= kills
    for destination in destinations:
        found = _rows_of(destination, node.run_id, acknowledged)
        rows, kind = set(found), destination.config["kind"]
        lacking, foreign = acknowledged - rows, rows - tried
        assert not lacking, f"{kind} lacks {_few(lacking)} of {len(acknowledged)} rows"
        assert not foreign, f"{kind} has {_few(foreign)} that were never logged"
        if destination.idempotent:
            doubles = {row for row, count in found.items() if count > 1}
            assert not doubles, f"{kind} has {_few(doubles)} more than once"


def _rows_of(destination: Destination, run: str, wanted: set[Row]) -> Counter[Row]:
    """What is there, once all is readable that was taken."""
    limit = time.monotonic() + destination.readable_after_seconds
    while not wanted <= set(found := destination.rows(run)) and time.monotonic() < limit:
        time.sleep(0.1)
    return found


def _few(rows: set[Row]) -> str:
    return f"{len(rows)} ({', '.join(map(str, sorted(rows)[:5]))}{', …' if len(rows) > 5 else ''})"


def cursor_rows(node: Node) -> dict[str, int]:
    """By backend, how many rows its cursor says it has."""
    from nodetrack.journal.cursor import read_cursors

    return {kind: cursor.rows() for kind, cursor in read_cursors(node.run.folder).items()}


def encoded(value: object) -> str:
    """As JSON, for a command line or a variable."""
    return msgspec.json.encode(value).decode()
