"""What a backend is: an object with `write(batch)`.

A backend is a class with a pydantic config whose literal `kind` is its name. Importing the module must not
import the backend's SDK: a trainer parses the config, and only the delivery process opens the backend.

| what goes wrong                                  | raise                     | what delivery does         |
|--------------------------------------------------|---------------------------|----------------------------|
| the service refuses us: credentials, project     | BackendRefusedError       | `init` raises; later: waits|
| no answer, 5xx, 429, anything that may pass      | BackendUnavailableError,  | tries again for as long as |
|                                                  | or any other exception    | the run lives              |
| this batch will never be taken: too large, 400   | BatchRejectedError        | halves it, keeps what is   |
|                                                  |                           | refused in quarantine      |
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from nodetrack.records import JsonValue, Record, Row


class BackendConfig(BaseModel):
    """The root of all backend configs; a subclass adds `kind: Literal["its name"] = "its name"`.

    Secrets are `SecretStr`: they reach the delivery process, and no file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_seconds: float = Field(1.0, gt=0, description="seconds that a row waits for others, at most")
    batch_rows: int = Field(5_000, ge=1, description="records sent at once, at most")
    batch_bytes: int = Field(4_000_000, ge=1, description="bytes of the journal sent at once, at most")

    def destination(self) -> str:
        """Where the rows end up, in words without secrets. Another destination gets the run from its
        beginning: each has its own cursor.
        """
        return ""

    def public(self) -> dict[str, JsonValue]:
        """The options that were given, without the secrets: what `nodetrack sync` needs to go on."""
        given = self.model_dump(mode="json", exclude_defaults=True)
        secret = {name for name, value in self if isinstance(value, SecretStr)}
        kept = {name: value for name, value in given.items() if name not in secret}
        return {"kind": self.model_dump(mode="json")["kind"], **kept}


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Whose rows a batch holds, as the journal knew it when the batch was read."""

    project: str
    run: str
    attempt: str
    version: str
    role: str
    uid: str
    attempt_number: int = 1
    environment: str = "prod"
    entity: str | None = None
    name: str = ""
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    previous_run: str | None = None
    started_ns: int = 0
    #: The run's folder. A backend that writes files puts them where its config says, not here.
    folder: Path = Path()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one segment in the order in which they were logged, all kinds but marks.

    A batch that is sent again may be cut differently; the record's own place, (run, attempt, segment,
    offset), is the same for ever.
    """

    run: RunInfo
    records: Sequence[Record]
    #: The number of the segment, and who wrote it: 1 is the node, another number the forked process whose
    #: first segment has it.
    segment: int = 1
    writer: int = 1
    #: Whether the delivery process wrote them, for the node: samples of the machine, the end of a killed one.
    companion: bool = False

    @property
    def rows(self) -> list[Row]:
        """The logged rows among the records."""
        return [record for record in self.records if isinstance(record, Row)]


class Sdk(NamedTuple):
    """The package that a backend needs: the module to import and the extra of nodetrack that installs it."""

    module: str
    extra: str


Config = TypeVar("Config", bound=BackendConfig)


class Backend(ABC, Generic[Config]):
    """Where the records of one run end up.

    Delivery calls `open` once, then `write` for batch after batch from one thread, then `close`. After
    failures it may close and open it again. A backend that is `in_process` is called by the run itself
    instead, right after the journal has the row, under the run's lock.
    """

    config_class: ClassVar[type[BackendConfig]]
    sdk: ClassVar[Sdk | None] = None
    in_process: ClassVar[bool] = False
    #: Environment variables that it reads, credentials included: what a launched job needs.
    variables: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        #: Kept with the cursor, and put back as it was when a batch is sent again: set it in `write` to
        #: remember what depends on what has been delivered. JSON values.
        self.memory: dict[str, JsonValue] = {}
        #: Values that it has no way to show, by reason, since it was opened. See `leave_out`.
        self.left_out: dict[str, int] = {}

    def open(self, run: RunInfo) -> None:
        """Make ready for `run`, the newest attempt. Raises as the module says; returns in bounded time."""

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Take a batch. On return the backend has it for good; an exception means that it may be sent again.

        Must come back in bounded time: give every call of the service a time-out.
        """

    def close(self) -> None:
        """Let go of what `open` needed. The default has nothing. Never raises for the network."""
        return

    @property
    def url(self) -> str | None:
        """Where a person can look at the run, once opened."""
        return None

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count values that this backend cannot show, such as an image: no value is dropped uncounted."""
        self.left_out[reason] = self.left_out.get(reason, 0) + count

    @classmethod
    def forward_env(cls) -> dict[str, str]:
        """The variables with their values that a launched job needs to use this backend as we do."""
        return {name: os.environ[name] for name in cls.variables if name in os.environ}
