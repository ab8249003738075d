"""Our `log` and our end in a run of wandb's, which otherwise stays what it is."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from nodetrack.identity.lock import NodeLock
from nodetrack.keeper import Keeper
from nodetrack.live_run import Run
from nodetrack.wandb_rows import Send, WandbRows
from nodetrack.wandb_service import described

if TYPE_CHECKING:
    import wandb

_HEARTBEAT_STOP_SECONDS: Final = 5.0

_log = logging.getLogger("nodetrack")


class Ending:
    """Keeps the lock of the id file alive, and gives it back at the end, even if nobody calls `finish`."""

    def __init__(self, lock: NodeLock | None, heartbeat_seconds: float) -> None:
        self._lock = lock
        self._heartbeat = Keeper(lambda: None, self._touch, heartbeat_seconds)
        if lock is not None:
            self._heartbeat.start()
            atexit.register(lock.release)

    def _touch(self) -> None:
        if self._lock is not None:
            self._lock.touch()

    def end(self) -> None:
        """Twice is harmless."""
        if self._lock is not None:
            self._heartbeat.stop(_HEARTBEAT_STOP_SECONDS)
            self._lock.release()
            atexit.unregister(self._lock.release)


def journal_of(run: wandb.Run) -> Run:
    """The journal's run of a run that `initialize_wandb` returned."""
    return cast("Run", vars(run)["nodetrack_run"])


def pid_of(run: wandb.Run) -> int:
    """The process that opened the run."""
    return cast("int", vars(run).get("nodetrack_pid", os.getpid()))


def install(run: wandb.Run, journal: Run, ending: Ending) -> None:
    """Puts our `log` where `run.log`, `wandb.run.log` and `wandb.log` find it, and our end before wandb's."""
    import wandb

    rows = WandbRows(journal, cast("Send", run.log), getattr(run, "starting_step", run.step))
    own = vars(run)
    own["nodetrack_run"] = journal
    own["nodetrack_pid"] = os.getpid()
    own["log"] = rows.log
    if wandb.run is run:
        wandb.log = rows.log
    # `finish`, the end of a `with` block and `wandb.finish` all come through `_finish` where there is one.
    name = "_finish" if hasattr(run, "_finish") else "finish"
    own[name] = _finish_both(getattr(run, name), journal, rows, ending)


def _finish_both(
    finish: Callable[..., None], journal: Run, rows: WandbRows, ending: Ending
) -> Callable[..., None]:
    def finish_both(exit_code: int | None = None, *further: object, **named: object) -> None:
        first = not journal.finished
        journal.finish(exit_code or 0)
        if first and rows.refused:
            _log.warning(
                "%d rows of run %s did not reach W&B; the journal in %s has them.",
                rows.refused,
                journal.id,
                journal.folder,
            )
        try:
            finish(exit_code, *further, **named)
        except Exception as error:  # the end of training must not depend on the service either
            _log.warning(
                "W&B run %s could not be finished (%s); the journal is complete.",
                journal.id,
                described(error),
            )
        ending.end()

    return finish_both
