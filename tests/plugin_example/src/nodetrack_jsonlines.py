"""A backend in a package of its own: every record becomes one line of JSON in a file.

It is an example to start from, and what tests of delivery break at will: while the control file is there,
each of its lines `<call> <fault> [argument]` spoils a call (`open`, `write`, `close`, or `*` for all).

| fault          | what the call does                                                        |
|----------------|---------------------------------------------------------------------------|
| `refuse`       | raises BackendRefusedError                                                |
| `unavailable`  | raises BackendUnavailableError; argument: seconds of Retry-After          |
| `fail`         | raises RuntimeError, as an SDK might                                      |
| `reject`       | raises BatchRejectedError; argument: only of batches that hold this metric |
| `hang`         | comes back when the line is gone; argument: or after so many seconds      |
| `lose`         | `write` only: keeps the batch, then fails as if the answer had been lost  |
| `exit`         | ends the process at once, without any goodbye                             |
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from pydantic import SecretStr

from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.records import Record

TOKEN_VARIABLE = "JSONLINES_TOKEN"
#: What `needs_token` takes for the right one.
RIGHT_TOKEN = "let-me-in"


class JsonlinesConfig(BackendConfig):
    """`path` takes the lines; `control` is the file that spoils calls, by default `<path>.control`."""

    kind: Literal["jsonlines"] = "jsonlines"
    path: Path
    control: Path | None = None
    needs_token: bool = False
    token: SecretStr | None = None

    def destination(self) -> str:
        """See BackendConfig."""
        return str(self.path.absolute())


class JsonlinesBackend(Backend[JsonlinesConfig]):
    """Appends `{"run", "attempt", "version", "segment", "writer", "offset", "record", …}` a record.

    NaN and the infinities are written as Python's `json` writes them. A batch that is sent twice is in the
    file twice: `run`, `attempt`, `segment` and `offset` say which lines are the same record.
    """

    config_class = JsonlinesConfig
    variables: ClassVar = (TOKEN_VARIABLE,)

    def open(self, run: RunInfo) -> None:
        """See Backend."""
        self._meet("open")
        given = self.config.token
        token = given.get_secret_value() if given is not None else os.environ.get(TOKEN_VARIABLE)
        if self.config.needs_token and token != RIGHT_TOKEN:
            raise BackendRefusedError(f"401: jsonlines does not know this token; set {TOKEN_VARIABLE}.")

    def write(self, batch: Batch) -> None:
        """See Backend."""
        lose = self._meet("write", batch)
        lines = "".join(f"{_line(batch, record)}\n" for record in batch.records)
        self.config.path.parent.mkdir(parents=True, exist_ok=True)
        with self.config.path.open("ab", buffering=0) as file:
            file.write(lines.encode())
            os.fsync(file.fileno())
        batches = self.memory.get("batches", 0)
        self.memory["batches"] = (batches if isinstance(batches, int) else 0) + 1
        if lose:
            raise ConnectionError("The answer of jsonlines was lost.")

    def close(self) -> None:
        """See Backend."""
        self._meet("close")

    @property
    def url(self) -> str:
        """See Backend."""
        return self.config.path.absolute().as_uri()

    def _meet(self, call: str, batch: Batch | None = None) -> bool:
        """Do what the control file says of this call; True if the answer is to be lost after it."""
        lose = False
        for fault, argument in self._faults(call):
            if fault == "refuse":
                raise BackendRefusedError("403: jsonlines was told to refuse.")
            if fault == "unavailable":
                raise BackendUnavailableError(
                    "503: jsonlines was told to be away.", float(argument) if argument else None
                )
            if fault == "fail":
                raise RuntimeError("jsonlines was told to fail.")
            if fault == "reject" and (not argument or (batch is not None and _holds(batch, argument))):
                raise BatchRejectedError("400: jsonlines was told to reject this.")
            if fault == "exit":
                os._exit(3)
            if fault == "hang":
                self._hang(call, float(argument) if argument else None)
            lose = lose or fault == "lose"
        return lose

    def _hang(self, call: str, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        while any(fault == "hang" for fault, _ in self._faults(call)):
            if end is not None and time.monotonic() >= end:
                return
            time.sleep(0.02)

    def _faults(self, call: str) -> list[tuple[str, str]]:
        control = self.config.control or self.config.path.with_name(f"{self.config.path.name}.control")
        try:
            lines = control.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        spoilt = [line.split(" ", 2) for line in lines if line.strip()]
        return [(fault, " ".join(rest)) for name, fault, *rest in spoilt if name in (call, "*")]


def read_lines(path: Path) -> list[dict[str, object]]:
    """The lines of the file so far, in the order in which they came; [] if there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _line(batch: Batch, record: Record) -> str:
    run = batch.run
    fields = {
        "run": run.run,
        "attempt": run.attempt,
        "version": run.version,
        "segment": batch.segment,
        "writer": batch.writer,
        "record": type(record).__name__,
        **msgspec.to_builtins(record),
    }
    return json.dumps(fields)


def _holds(batch: Batch, metric: str) -> bool:
    return any(metric in row.names for row in batch.rows)
