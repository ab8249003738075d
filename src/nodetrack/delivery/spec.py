"""What the trainer and its delivery process tell each other: lines of JSON, one message a line.

| on the process's …   | message  | when                                                    |
|----------------------|----------|---------------------------------------------------------|
| standard input       | a list   | first, once: where the trainer imports from             |
|                      | `Spec`   | then, once: what to deliver. Secrets travel here only.  |
|                      | `End`    | the trainer has finished; no record of its own follows   |
|                      | (end of file) | the trainer is gone: the pipe is its life line      |
| standard output      | `Answer` | a backend's state changed; the first is the hand-shake  |
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from pydantic import BaseModel, SecretBytes, SecretStr

from nodetrack.records import JsonValue, SegmentHeader
from nodetrack.settings import environment

#: A line is written in one piece or not at all, so that it is never cut: the least that POSIX allows a pipe.
MAX_ANSWER_BYTES: Final = 4096
_MAX_MESSAGE_CHARACTERS: Final = 600
#: The system refuses to start a process with a variable of 128 KiB.
_MOST_VARIABLE_BYTES: Final = 128 * 1024 - 2

#: starting: it is asked. ready: it lets us in. waiting: another process is sending this run to it. remark: a
#: sentence to pass on, of no backend alone.
AnswerState = Literal["starting", "ready", "down", "refused", "waiting", "remark"]


class TrainerProcess(msgspec.Struct, frozen=True):
    """The process that logs, by what tells it from a later one of the same number."""

    pid: int
    created_at: float
    start_ticks: int | None


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a delivery process has to know. Never an argument or a variable: others can read those."""

    #: The run's folder as the file system spells it, which need not be UTF-8.
    folder: bytes
    #: What the headers of the segments say that the delivery process writes.
    header: SegmentHeader
    #: As given to `init`, secrets included: see `revealed`.
    backends: list[object] = []
    trainer: TrainerProcess
    finish_timeout: float
    heartbeat_seconds: float
    system_seconds: float = 0.0
    segment_bytes: int
    keep_bytes: int | None = None
    max_bytes: int | None = None

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return Path(os.fsdecode(self.folder))

    @property
    def attempt_folder(self) -> Path:
        """The folder of the attempt's segments."""
        return self.run_folder / self.header.attempt


class End(msgspec.Struct, frozen=True):
    """The trainer has finished. The rest is sent for at most so many seconds."""

    drain_seconds: float


class Answer(msgspec.Struct, frozen=True):
    """Where a backend stands, in its own words."""

    backend: str
    state: AnswerState
    message: str = ""
    url: str | None = None


_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(Spec).decode
_decode_end = msgspec.json.Decoder(End).decode
_decode_answer = msgspec.json.Decoder(Answer).decode


def encode_line(message: Spec | End) -> bytes:
    """A message as one line."""
    return _encode(message) + b"\n"


def encode_import_path(folder: Path) -> bytes:
    """Where this process imports from, as it is now, so that plug-ins beside a script are found as well.
    A relative entry is one of `folder`. Python's own JSON: nothing else can be imported yet where it is read.
    """
    return json.dumps([*dict.fromkeys(str(folder / entry) for entry in sys.path)]).encode() + b"\n"


def environment_to_start_with() -> dict[str, str]:
    """This environment, and what a `.env` in the working folder adds to it. Without what the process could
    not start with, or not as this one did.
    """
    return {
        name: value
        for name, value in environment().items()
        if len(os.fsencode(name)) + len(os.fsencode(value)) < _MOST_VARIABLE_BYTES
        and name != "PYTHONPATH"  # see `encode_import_path`: not in front of the standard library
        and (name in os.environ or not name.startswith("PYTHON"))
    }


def encode_answer(answer: Answer) -> bytes:
    """An answer as one line that fits into one write; a long message is cut."""
    message = answer.message
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        message = f"{message[:_MAX_MESSAGE_CHARACTERS]}…"
    url = answer.url if answer.url is None or len(answer.url) <= 1000 else None
    message = message.encode("utf-8", "replace").decode()
    line = _encode(msgspec.structs.replace(answer, message=message, url=url)) + b"\n"
    return line if len(line) <= MAX_ANSWER_BYTES else _encode(Answer(answer.backend, answer.state)) + b"\n"


def decode_spec(line: bytes) -> Spec:
    """The first line of a delivery process's input."""
    return _decode_spec(line)


def decode_end(line: bytes) -> End | None:
    """A later line; None if it is no `End`."""
    try:
        return _decode_end(line)
    except msgspec.DecodeError:
        return None


def decode_answer(line: bytes) -> Answer | None:
    """A line of a delivery process's output; None if it is no answer."""
    try:
        return _decode_answer(line)
    except msgspec.DecodeError:
        return None


def revealed(value: object) -> JsonValue:
    """A backend's options as JSON can hold them, with the secrets that the service has to be shown."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, SecretBytes):
        return value.get_secret_value().decode()
    if isinstance(value, BaseModel):
        return revealed(dict(value))
    if isinstance(value, Mapping):
        return {str(name): revealed(item) for name, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [revealed(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()  # bytes of a path may be no text


def name_of(given: object) -> str:
    """The kind of a backend in `Spec.backends`."""
    return str(given["kind"]) if isinstance(given, Mapping) else str(given)
