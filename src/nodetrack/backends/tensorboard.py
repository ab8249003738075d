"""The backend that writes TensorBoard's event files.

    <log_dir>/<project>/<role>-<uid>-<run>/<attempt>             one event file, written by the node itself
    <log_dir>/<project>/<role>-<uid>-<run>/<attempt>/writer-<n>  that of a forked process
    <log_dir>/<project>/<role>-<uid>-<run>/<attempt>/system      samples of the machine

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
from nodetrack.machine import working_folder
from nodetrack.records import JsonValue, Row, SystemRow

if TYPE_CHECKING:
    from nodetrack.backends._tensorboard_events import Encoder

#: TensorBoard reads files whose name holds "tfevents". It is the same at every start: we go on with the file.
_FILE_NAME: Final = "events.out.tfevents.nodetrack"
#: The user's mistakes; anything else may pass, such as a full disk.
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)

_log = logging.getLogger("nodetrack")


def _absolute(folder: Path) -> Path:
    """Also in a working folder that was removed."""
    return folder if folder.is_absolute() else working_folder() / folder


class TensorboardConfig(BackendConfig):
    """`tensorboard --logdir` takes the same folder."""

    kind: Literal["tensorboard"] = "tensorboard"
    log_dir: Annotated[Path, AfterValidator(_absolute)] = Field(
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
        self._encoder: Encoder | None = None
        #: Files that were not as they had been left, until the first write of the new ones has succeeded.
        self._begun_anew: set[Path] = set()

    def open(self, run: RunInfo) -> None:
        """See Backend. A folder that cannot be made or written is the user's mistake."""
        self._encoder_of(run)  # imports TensorBoard
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
        encode = self._encoder_of(batch.run).encode
        shares: dict[str, _Share] = {}
        attempt = file_name_part(batch.run.attempt)
        own = attempt if batch.writer == 1 else f"{attempt}/writer-{batch.writer}"
        for record in batch.records:
            key = f"{attempt}/system" if isinstance(record, SystemRow) else own
            share = shares.get(key)
            if share is None:
                share = shares[key] = _Share(self.memory.get(key))
            share.events += encode(record, share.step)
            if isinstance(record, Row):
                share.step = record.step
        written = {
            key: self._append(self._place(batch.run, key, share) / _FILE_NAME, share)
            for key, share in shares.items()
            if share.events
        }
        self.memory = {**self.memory, **written}

    def _encoder_of(self, run: RunInfo) -> Encoder:
        from nodetrack.backends._tensorboard_events import Encoder

        if self._encoder is None or self._encoder.run != run:
            self._encoder = Encoder(run, self.leave_out)
        return self._encoder

    def _place(self, run: RunInfo, key: str, share: _Share) -> Path:
        """The folder of a file. One that was begun under the run's id alone is gone on with where it is."""
        folder = _run_folder(self.config.log_dir, run)
        older = folder.with_name(file_name_part(run.run)) / key
        is_older = share.size and older.exists() and not (folder / key).exists()
        return older if is_older else folder / key

    def _append(self, path: Path, share: _Share) -> list[JsonValue]:
        """Write a file's share of a batch behind what the file is known to hold. What to remember of it."""
        from nodetrack.backends._tensorboard_events import file_version, framed

        there = path.stat().st_size if path.exists() else 0
        size = 0 if path in self._begun_anew else share.size
        content = framed(share.events if size else [file_version(), *share.events])
        if there < size or (there and not share.size and not _begins_like(path, content)):
            self._begin_anew(path, there, size)
            there, size, content = 0, 0, framed([file_version(), *share.events])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if there else "wb") as file:
            file.truncate(size)
            file.seek(size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._begun_anew.discard(path)
        return [size + len(content), share.step]

    def _begin_anew(self, path: Path, there: int, size: int) -> None:
        """The file is not as it was left, or nothing is known of it though it is there: it is kept."""
        aside = path.parent / f"earlier-{time.time_ns()}"
        if there:
            aside.mkdir()
            path.replace(aside / _FILE_NAME)
        self._begun_anew.add(path)
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

    def __init__(self, remembered: JsonValue) -> None:
        #: The length of the file, and the step of the last row in it, as they were after the last batch.
        self.size, self.step = cast("tuple[int, int | None]", remembered or (0, None))
        self.events: list[bytes] = []


def _run_folder(log_dir: Path, run: RunInfo) -> Path:
    """Named by what never changes of a run, the node first: it is the name that TensorBoard's pages show."""
    name = "-".join(part for part in (run.role, run.uid, run.run) if part)
    return log_dir / file_name_part(run.project) / file_name_part(name)


def _begins_like(path: Path, content: bytes) -> bool:
    """Whether a file of which nothing is known holds what is about to be written, as far as both go."""
    with path.open("rb") as file:
        there = file.read(len(content))
    return content.startswith(there)
