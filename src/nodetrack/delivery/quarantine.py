"""Records that a backend refuses for good, kept with the reason, for a person to look at.

    <run>/quarantine/<backend>.jsonl     one JSON object a record: attempt, segment, offset, reason, record

The journal has them as well; this says which they are. After a crash the last ones may stand here twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from nodetrack.backends.base import Batch
from nodetrack.records import Record

QUARANTINE: Final = "quarantine"


class Quarantine:
    """The file of one backend of one run, made when it is first needed."""

    def __init__(self, run_folder: Path, backend: str) -> None:
        self.path = run_folder / QUARANTINE / f"{backend}.jsonl"

    def add(self, batch: Batch, record: Record, reason: str) -> None:
        """Append one record. Raises OSError."""
        line = {
            "attempt": batch.run.attempt,
            "segment": batch.segment,
            "offset": record.offset,
            "reason": reason,
            "kind": type(record).__name__,
            "record": _strict(msgspec.structs.asdict(record)),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _strict(value: object) -> object:
    """As strict JSON holds it: NaN and the infinities by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_strict(item) for item in value]
    return value
