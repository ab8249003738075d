"""The run-id file: what makes a restarted node find its run again.

One small JSON file a node, `<dir>/<project>/ids/<role>-<uid>.json`:

    {"schema_version": 1, "id": "k3v9…", "fingerprint": {"project": …, "role": …, "uid": …, "host": …},
     "folder": "<dir> as an absolute path", "previous_run": null, "created_at": …, "verified_at": null}

Promises: whoever opens the file finds a whole old record or a whole new one, never an empty or half
file, at whatever instant the writer dies; nothing here deletes an id, a file that cannot be used is
kept under another name beside it. Only create, rename and fsync are used (no mmap, no file locks), so
that it holds on NFS as well.

`TextRunIdFile` keeps the same record for nodes that have `wandb/wandb_run_id_<prefix><uid>.txt`: the
text file holds the bare id, a JSON file beside it the rest.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import glob
import hashlib
import itertools
import os
import secrets
import stat
import string
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import msgspec

from nodetrack.machine import encodable, this_host

SCHEMA_VERSION = 1
MAX_ID_BYTES = 128
_ID_ALPHABET = string.digits + string.ascii_lowercase
_NEW_ID_LENGTH = 10  # 36**10 ids: two nodes of a fleet meet by chance about never
_ILLEGAL_IN_ID = ":;,#?/'\\"  # what wandb refuses, and the backslash, because an id is a folder's name too
_MAX_FILE_BYTES = 64 * 1024
_MAX_NAME_BYTES = 120
_MAX_ID_PART_BYTES = 64  # of an id in the name of a file that is kept, behind a name of the above
_HASH_LENGTH = 16
_ABANDONED_AFTER_SECONDS = 3600.0


class Fingerprint(msgspec.Struct, frozen=True):
    """Whose id it is. Another host alone is a move; another project, role or uid is another node."""

    project: str
    role: str
    uid: str
    host: str

    def same_node(self, other: Fingerprint) -> bool:
        """Whether both name the same node, wherever it runs."""
        return (self.project, self.role, self.uid) == (other.project, other.role, other.uid)

    @classmethod
    def here(cls, project: str, role: str, uid: str) -> Fingerprint:
        """The fingerprint of a node that runs on this host."""
        return cls(encodable(project), encodable(role), encodable(uid), this_host().hostname)

    def __str__(self) -> str:
        return f"{self.role} {self.uid} of project {self.project}"


class RunIdRecord(msgspec.Struct, frozen=True):
    """What an id file says. Times are ISO 8601 in UTC; `fingerprint` is None where nobody wrote one."""

    id: str
    fingerprint: Fingerprint | None = None
    folder: str = ""
    previous_run: str | None = None
    created_at: str = ""
    verified_at: str | None = None
    schema_version: int = SCHEMA_VERSION


class IdFileState(enum.Enum):
    """What reading an id file found."""

    MISSING = "missing"
    READABLE = "readable"
    NEWER = "newer"  # another release wrote it: its id counts, the file is left alone
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"  # the system does not let us look: nothing is known, nothing is touched


@dataclass(frozen=True)
class IdFileReading:
    """The outcome of one reading; `reason` says in words why there is no record, or what is odd."""

    state: IdFileState
    record: RunIdRecord | None = None
    reason: str = ""


def new_run_id() -> str:
    """A fresh id: ten characters of 0-9a-z from the system's random source."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_NEW_ID_LENGTH))


def check_run_id(run_id: str) -> str | None:
    """None if the text can be a run id, else the reason in words."""
    if not run_id:
        return "it is empty"
    if not run_id.isprintable() or any(character.isspace() for character in run_id):
        return "it has white space or characters that cannot be printed"
    if len(run_id.encode("utf-8")) > MAX_ID_BYTES:
        return f"it is longer than {MAX_ID_BYTES} bytes"
    if found := sorted(set(run_id) & set(_ILLEGAL_IN_ID)):
        return f"it has {' '.join(found)}"
    if run_id.startswith("."):
        return "it begins with a dot"
    return None


def file_name_part(text: str) -> str:
    """The text as part of a file name: readable for plain names, percent-encoded where it must be.

    At most 120 bytes: file systems allow 255 for a name, and other parts come before and behind it.
    """
    encoded = _encoded(text)
    return encoded if len(encoded) <= _MAX_NAME_BYTES else _shortened(text)


def _encoded(text: str) -> str:
    encoded = quote(text, safe="", errors="surrogatepass")
    return encoded.replace(".", "%2E") if encoded.strip(".") == "" else encoded


def _shortened(text: str, longest: int = _MAX_NAME_BYTES) -> str:
    """As many characters of the text as there is room for, and a hash of it all.

    Decoded and encoded again it is the same, so that a name found on disk leads back to its folder.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    room = longest - _HASH_LENGTH - 1
    ends = itertools.accumulate(len(_encoded(f"a{character}")) - 1 for character in text)
    return f"{_encoded(text[: sum(end <= room for end in ends)])}-{digest}"


def id_path(folder: Path, project: str, role: str, uid: str) -> Path:
    """Where the node's id file lies: `<folder>/<project>/ids/<role>-<uid>.json`.

    A dash in the role is encoded, so that no two nodes share a file.
    """
    name = f"{_encoded(role).replace('-', '%2D')}-{_encoded(uid)}"
    if len(name) > _MAX_NAME_BYTES:
        name = _shortened(name)
    return folder / file_name_part(project) / "ids" / f"{name}.json"


def now_text() -> str:
    """The present in the form that id files use."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class RunIdFile:
    """One node's id file. Reading never raises; `write` and `archive` raise OSError when the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> IdFileReading:
        """The record, or the reason why there is none. A file that cannot be used stays where it is."""
        content = _read_small(self.path)
        return content if isinstance(content, IdFileReading) else self._parse(content)

    def write(self, record: RunIdRecord) -> None:
        """Replaces the record in one instant; on return it has reached the disk."""
        replace_file(self.path, _encode(record))

    def archive(self, run_id: str) -> Path:
        """Keeps the present content as `<name>.<run id>.bak`; the file itself stays until the next write."""
        is_short = len(run_id.encode("utf-8")) <= _MAX_ID_PART_BYTES
        short = run_id if is_short else _shortened(run_id, _MAX_ID_PART_BYTES)
        kept = self.path.with_name(f"{self.path.name}.{short}.bak")
        replace_file(kept, self.path.read_bytes())
        return kept

    def set_aside(self) -> Path:
        """Renames a file that cannot be used to `<name>.damaged-<time>` and says where it is now."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        kept = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        self.path.rename(kept)
        return kept

    def _parse(self, content: bytes) -> IdFileReading:
        return _parse_record(content)


class TextRunIdFile(RunIdFile):
    """The id alone in a text file, as nodes without nodetrack wrote it; the rest is in a JSON file beside it.

    The text file decides. A side file that names another id is of no use and is ignored.
    """

    @property
    def side_path(self) -> Path:
        """The JSON file that holds fingerprint and history."""
        return self.path.with_suffix(".json")

    def write(self, record: RunIdRecord) -> None:
        """Replaces the text file first: if the process dies in between, the side file no longer counts."""
        replace_file(self.path, record.id.encode("utf-8"))
        replace_file(self.side_path, _encode(record))

    def _parse(self, content: bytes) -> IdFileReading:
        try:
            run_id = content.decode("utf-8").strip()
        except UnicodeDecodeError:
            return IdFileReading(IdFileState.DAMAGED, reason="it is not text")
        if problem := check_run_id(run_id):
            return IdFileReading(IdFileState.DAMAGED, reason=f"what it holds is not a run id: {problem}")
        return IdFileReading(IdFileState.READABLE, self._side_record(run_id) or RunIdRecord(run_id))

    def _side_record(self, run_id: str) -> RunIdRecord | None:
        content = _read_small(self.side_path)
        if isinstance(content, IdFileReading):
            return None
        record = _parse_record(content).record
        return record if record is not None and record.id == run_id else None


def replace_file(path: Path, content: bytes) -> None:
    """Writes a whole file in one instant: a reader sees the old bytes or the new ones.

    The bytes and the rename have reached the disk on return. Raises OSError; the old file is then intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, f".{glob.escape(path.name)}.*.tmp")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temporary, content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders; the rename itself is done.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Removes matching files older than an hour: those of killed writers, which nobody else would remove."""
    oldest = time.time() - _ABANDONED_AFTER_SECONDS
    for found in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another writer removed it first, or the folder is read-only
            if found.stat().st_mtime < oldest:
                found.unlink()


def read_small(path: Path) -> bytes:
    """The beginning of a file, a little more than the longest that is allowed; b"" for a pipe or a device.

    Reading such a one could wait for ever for somebody at its other end. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _read_small(path: Path) -> bytes | IdFileReading:
    """The file's bytes, or the reading that says why there are none."""
    try:
        content = read_small(path)
    except FileNotFoundError:
        return IdFileReading(IdFileState.MISSING, reason="there is no file yet")
    except OSError as error:
        return IdFileReading(IdFileState.UNREADABLE, reason=error.strerror or str(error))
    if not content.strip():
        return IdFileReading(IdFileState.DAMAGED, reason="it is empty")
    if len(content) > _MAX_FILE_BYTES:
        return IdFileReading(IdFileState.DAMAGED, reason="it is far too long for an id file")
    return content


def _parse_record(content: bytes) -> IdFileReading:
    try:
        record = msgspec.json.decode(content, type=RunIdRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return IdFileReading(IdFileState.DAMAGED, reason=f"it is not an id file ({error})")
    if problem := check_run_id(record.id):
        return IdFileReading(IdFileState.DAMAGED, reason=f"its id cannot be used: {problem}")
    if record.schema_version > SCHEMA_VERSION:
        reason = f"it has schema_version {record.schema_version}, this release writes {SCHEMA_VERSION}"
        return IdFileReading(IdFileState.NEWER, record, reason)
    return IdFileReading(IdFileState.READABLE, record)


def folder_text(folder: Path) -> str:
    """A tracking folder as id files name it: absolute, and as escapes where it is no text."""
    return encodable(os.path.abspath(folder))  # noqa: PTH100 - `Path.resolve` would follow links


def _encode(record: RunIdRecord) -> bytes:
    record = msgspec.structs.replace(record, folder=encodable(record.folder))
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
