"""How far a backend has come: one small file a run and backend, replaced in one instant after every batch.

    <run>/cursors/<backend>.json

It counts rows by attempt and segment, so that what is missing can be named, and holds what the backend
wants to remember (`memory`), so that both move together: a crash between a send and its cursor repeats at
most that one batch. No secret is in it; `config` are the options that `nodetrack sync` goes on with.

Each destination has a cursor of its own. When a backend is pointed elsewhere, the cursor of the place that
it left is kept as `<backend>@<hash>.json` and taken up again when it comes back.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from nodetrack.identity.id_file import replace_file

CURSORS: Final = "cursors"
SCHEMA_VERSION: Final = 1
#: starting: has not answered yet. down: cannot be had just now. refused: does not let us in.
BackendState = Literal["starting", "ok", "down", "refused"]

_log = logging.getLogger("nodetrack")


class SegmentProgress(msgspec.Struct, omit_defaults=True):
    """How far a backend has come in one segment."""

    #: Behind the last record that it has, in bytes.
    offset: int = 0
    #: The rows among them that it took, that it refused for good, and that were removed before it had them.
    rows: int = 0
    quarantined: int = 0
    lost: int = 0
    #: Who wrote the segment: the number of that process's first one.
    writer: int = 0
    #: The highest step among the rows; None before the first.
    step: int | None = None


class Cursor(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One backend's progress through a run. Whoever holds the backend's lock may change it."""

    schema_version: int = SCHEMA_VERSION
    backend: str
    destination: str = ""
    config: dict[str, Any] = {}  # JSON; msgspec has no way to say so
    state: BackendState = "starting"
    #: By attempt and by the name of the segment's file.
    attempts: dict[str, dict[str, SegmentProgress]] = {}
    #: Values that the backend has no way to show, by reason.
    left_out: dict[str, int] = {}
    #: Records other than rows that it refused for good.
    quarantined_records: int = 0
    memory: dict[str, Any] = {}
    url: str | None = None
    last_error: str = ""
    last_error_ns: int = 0
    last_ack_ns: int = 0

    def progress(self, attempt: str, segment: str) -> SegmentProgress:
        """The entry of a segment, made if need be."""
        return self.attempts.setdefault(attempt, {}).setdefault(segment, SegmentProgress())

    def segments(self, attempt: str | None = None) -> Iterator[SegmentProgress]:
        """The entries of one attempt or of all."""
        for name, entries in self.attempts.items():
            if attempt in (None, name):
                yield from entries.values()

    def rows(self, attempt: str | None = None, writer: int | None = None) -> int:
        """How many rows the backend has, of one attempt and of one process of it, or of all."""
        return sum(entry.rows for entry in self.segments(attempt) if writer in (None, entry.writer))

    @property
    def quarantined(self) -> int:
        """How many rows it refused for good."""
        return sum(entry.quarantined for entry in self.segments())

    @property
    def lost(self) -> int:
        """How many rows were removed from the journal before it had them."""
        return sum(entry.lost for entry in self.segments())

    def note_error(self, state: BackendState, error: str) -> None:
        """The backend cannot be used just now."""
        self.state, self.last_error, self.last_error_ns = state, error, time.time_ns()


class CursorFile:
    """The cursor of one backend of one run, on disk."""

    def __init__(self, run_folder: Path, backend: str) -> None:
        self.backend = backend
        self.path = run_folder / CURSORS / f"{backend}.json"

    def read(self) -> Cursor | None:
        """The cursor as it stands; None if there is none, or none that can be used. Raises nothing."""
        return _read(self.path)

    def take_up(self, destination: str) -> Cursor:
        """The cursor for `destination`, a fresh one if nothing was ever sent there.

        Only for whoever holds the backend's lock. A damaged file is kept aside, with a warning: then the
        run is sent from its beginning.
        """
        cursor = self.read()
        if cursor is None:
            self._set_damaged_aside()
        elif cursor.destination == destination:
            return cursor
        else:
            with contextlib.suppress(OSError):  # a full disk: the old place would then be sent all again
                self.path.replace(self._path_for(cursor.destination))
        kept = self._path_for(destination)
        cursor = _read(kept) or Cursor(backend=self.backend, destination=destination)
        with contextlib.suppress(OSError):
            kept.unlink(missing_ok=True)
        return cursor

    def write(self, cursor: Cursor) -> None:
        """Replace the file in one instant. Raises OSError; the old one is then intact."""
        replace_file(self.path, msgspec.json.encode(cursor))

    def _path_for(self, destination: str) -> Path:
        name = hashlib.sha256(destination.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return self.path.with_name(f"{self.backend}@{name}.json")

    def _set_damaged_aside(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        try:
            self.path.replace(aside)
        except OSError:  # there is none
            return
        _log.warning(
            "The cursor %s could not be read and is kept as %s: the run is sent to %s from its beginning.",
            self.path,
            aside.name,
            self.backend,
        )


def read_cursors(run_folder: Path) -> dict[str, Cursor]:
    """The cursors of a run by backend, for whoever wants to know; {} where nothing was ever delivered."""
    try:
        paths = sorted((run_folder / CURSORS).glob("*.json"))
    except OSError:
        return {}
    found = {
        path.stem: _read(path) for path in paths if "@" not in path.stem and not path.stem.startswith(".")
    }
    return {backend: cursor for backend, cursor in found.items() if cursor is not None}


def _read(path: Path) -> Cursor | None:
    try:
        cursor = msgspec.json.decode(path.read_bytes(), type=Cursor)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return cursor if cursor.schema_version <= SCHEMA_VERSION else None
