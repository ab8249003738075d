"""What a backend is: an object with `write(batch)`.

A backend is a class with a pydantic config whose literal `kind` is its name. The configs parse where the
backend's SDK is missing; the SDK is imported only when the backend is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
from pydantic import BaseModel, ConfigDict

from nodetrack.records import StoredValue


class BackendConfig(BaseModel):
    """The root of all backend configs; a subclass adds `kind: Literal["its name"] = "its name"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunInfo(msgspec.Struct, frozen=True):
    """Whose rows a batch holds."""

    project: str
    run: str
    attempt: str
    version: str
    role: str
    uid: str


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """One logged row on its way to a backend."""

    step: int
    time_ns: int
    names: tuple[str, ...]
    values: Sequence[StoredValue]
    context: Mapping[str, str]


class Batch(msgspec.Struct, frozen=True):
    """Rows of one attempt, in the order in which they were logged."""

    run: RunInfo
    rows: Sequence[BatchRow]


class Backend(ABC):
    """Where rows end up. The run hands it each row, after the journal has it, under the run's lock: one call
    at a time. An exception means that nothing was taken.
    """

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Take a batch. On return the backend has it for good."""

    def close(self) -> None:
        """Let go of what `write` needed. The default has nothing."""
        return
