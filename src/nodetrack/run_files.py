"""The files of a run beside its journal, for people and for other programs: the journal says the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from nodetrack.journal.recover import attempt_folders
from nodetrack.records import JsonValue
from nodetrack.run_state import Identity

_RUN_FILE: Final = "run.json"


def write_side_files(
    identity: Identity, description: Mapping[str, JsonValue], config: Mapping[str, JsonValue]
) -> None:
    """Write what the run is, unless that stands there, and what its attempt is. Raises OSError."""
    run = {
        "schema_version": 1,
        "id": identity.run,
        "project": identity.project,
        "role": identity.role,
        "uid": identity.uid,
        "environment": identity.environment,
        "previous_run": identity.previous_run,
        "created_ns": time.time_ns(),
    }
    if not (identity.folder / _RUN_FILE).exists():
        (identity.folder / _RUN_FILE).write_bytes(_json(run))
    (identity.attempt_folder / "metadata.json").write_bytes(_json(description))
    (identity.attempt_folder / "config.json").write_bytes(_json(config))


def remove_unused(identity: Identity) -> None:
    """Take away an attempt that never logged, and its run if that has no other."""
    with contextlib.suppress(OSError):  # what cannot be removed does no harm
        for path in identity.attempt_folder.iterdir():
            path.unlink()
        identity.attempt_folder.rmdir()
        if not attempt_folders(identity.folder):
            (identity.folder / _RUN_FILE).unlink()
            identity.folder.rmdir()


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
