"""The backend that writes TensorBoard's event files.

    <log_dir>/<project>/<run>/<attempt>             one event file, written by the node itself
    <log_dir>/<project>/<run>/<attempt>/writer-<n>  that of a forked process
    <log_dir>/<project>/<run>/<attempt>/system      samples of the machine

Every folder holds one file: TensorBoard follows only the newest of several. The file is gone on with when
delivery starts again. Its length after each batch is remembered with the cursor, and what stands behind it
is cut off before the next: so a batch that is sent twice, or was written in part, is there once.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, cast

from pydantic import AfterValidator, Field

from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo, Sdk
from nodetrack.errors import BackendRefusedError
from nodetrack.identity.id_file import file_name_part
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    Event,
    JsonValue,
    Record,
    Row,
    RunEdited,
    SummarySet,
    SystemRow,
)

if TYPE_CHECKING:
    from nodetrack.backends import _tensorboard_events

#: TensorBoard reads files whose name holds "tfevents". It is the same at every start: we go on with the file.
_FILE_NAME: Final = "events.out.tfevents.nodetrack"
#: The user's mistakes; anything else may pass, such as a full disk.
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)

_log = logging.getLogger("nodetrack")


class TensorboardConfig(BackendConfig):
    """`tensorboard --logdir` takes the same folder."""

    kind: Literal["tensorboard"] = "tensorboard"
    log_dir: Annotated[Path, AfterValidator(Path.absolute)] = Field(
        Path("tensorboard"), description="folder of the event files", validate_default=True
    )

    def destination(self) -> str:
        """See BackendConfig."""
        return str(self.log_dir)


class TensorboardBackend(Backend[TensorboardConfig]):
    """See the module. `memory` holds, for each file, its length and the last step in it."""

    config_class = TensorboardConfig
    sdk: ClassVar = Sdk("tensorboard", "tensorboard")

    def __init__(self, config: TensorboardConfig) -> None:
        super().__init__(config)
        self._folder = config.log_dir
        self._encoders: dict[str, _tensorboard_events.Events] = {}

    def open(self, run: RunInfo) -> None:
        """See Backend. A folder that cannot be made or written is the user's mistake."""
        from nodetrack.backends import _tensorboard_events  # noqa: F401 - the delivery process pays for it here

        self._folder = _run_folder(self.config.log_dir, run)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            raise BackendRefusedError(
                f"TensorBoard's folder {self._folder} cannot be made ({error.strerror}): set another log_dir."
            ) from error
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise BackendRefusedError(
                f"TensorBoard's folder {self._folder} may not be written by this user: set another log_dir."
            )

    def write(self, batch: Batch) -> None:
        """See Backend."""
        shares: dict[str, _Share] = {}
        for record in batch.records:
            key = _key(batch, record)
            if key not in shares:
                shares[key] = _Share(batch.run, self.memory.get(key))
            self._encode(shares[key], record)
        resent = batch.segment == batch.writer  # from the beginning of what the process wrote
        written = {key: self._append(key, share, resent) for key, share in shares.items() if share.events}
        self.memory = {**self.memory, **written}

    def _encode(self, share: _Share, record: Record) -> None:
        """Add what is shown of a record. The rest (console, most events) TensorBoard has no place for."""
        from nodetrack.backends import _tensorboard_events as events

        time_ns, run, add = getattr(record, "time_ns", 0), share.run, share.events.append
        match record:
            case Row():
                self._encode_row(share, record)
            case SystemRow():
                add(events.system(record, run.started_ns))
            case ConfigSet():
                add(events.text(time_ns, "run/config", record.config))
                node = {"version": run.version, "role": run.role, "uid": run.uid}
                session = f"{run.run}/{run.attempt}"
                add(events.hyper_parameters(time_ns, session, {**node, **record.config}))
            case AttemptStarted():
                add(events.text(time_ns, "run/attempt", record.attempt))
            case RunEdited():
                add(events.text(time_ns, "run/labels", record.fields))
            case SummarySet():
                add(events.text(time_ns, "run/summary", record.summary))
            case Event(name="alert"):
                add(events.text(time_ns, "run/alert", record.data, share.step or 0))
            case Event(name="rewind", data={"step": int(step)}):
                add(events.purge(time_ns, step + 1))
            case AttemptFinished():
                add(events.text(time_ns, "run/end", {"state": record.state, "reason": record.reason}))
                add(events.end(time_ns, record.state))

    def _encode_row(self, share: _Share, row: Row) -> None:
        from nodetrack.backends import _tensorboard_events as events

        version = share.run.version
        if version not in self._encoders:
            self._encoders[version] = events.Events(version, self.leave_out)
        encoded = self._encoders[version].row(row)
        if encoded is not None:
            if share.step is None and share.run.attempt_number > 1:
                share.events.append(events.purge(row.time_ns, row.step))
            share.events.append(encoded)
            share.step = row.step

    def _append(self, key: str, share: _Share, resent: bool) -> list[JsonValue]:
        """Write a file's share of a batch behind what the file is known to hold. What to remember of it."""
        from nodetrack.backends import _tensorboard_events as events

        path = _run_folder(self.config.log_dir, share.run) / key / _FILE_NAME
        there = path.stat().st_size if path.exists() else 0
        size = share.size
        if there < size or (size == 0 and there and not resent):
            self._begin_anew(path, there, size)
            there = size = 0
        begin = [] if size else [events.file_version(share.run.started_ns)]
        content = events.framed([*begin, *share.events])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if there else "wb") as file:
            file.truncate(size)
            file.seek(size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return [size + len(content), share.step]

    def _begin_anew(self, path: Path, there: int, size: int) -> None:
        """The file is not as it was left, or is there though nothing is known of it: it is not touched."""
        if there:
            aside = path.parent / f"earlier-{time.time_ns()}"
            aside.mkdir()
            path.replace(aside / _FILE_NAME)
        _log.warning(
            "TensorBoard's file %s holds %d bytes, not the %d that were written: it is begun anew, and goes "
            "on from here%s.",
            path,
            there,
            size,
            f"; what there is of it is kept in {aside}" if there else "",
        )

    @property
    def url(self) -> str:
        """The folder to give to `tensorboard --logdir`."""
        return self._folder.as_uri()


class _Share:
    """What one file gets of a batch, and where the file stands."""

    def __init__(self, run: RunInfo, remembered: JsonValue) -> None:
        self.run = run
        #: The length of the file, and the step of the last row in it, as they were after the last batch.
        self.size, self.step = cast("tuple[int, int | None]", remembered or (0, None))
        self.events: list[bytes] = []


def _key(batch: Batch, record: Record) -> str:
    """The folder of the record's file under that of the run."""
    attempt = file_name_part(batch.run.attempt)
    if isinstance(record, SystemRow):
        return f"{attempt}/system"
    return attempt if batch.writer == 1 else f"{attempt}/writer-{batch.writer}"


def _run_folder(log_dir: Path, run: RunInfo) -> Path:
    return log_dir / file_name_part(run.project) / file_name_part(run.run)
